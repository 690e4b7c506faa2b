"""The 20 superclasses of CIFAR-100's classes, as its authors give them, to show related classes side by side."""

from __future__ import annotations

from collections.abc import Sequence

SUPERCLASSES: dict[str, tuple[str, ...]] = {
    "aquatic mammals": ("beaver", "dolphin", "otter", "seal", "whale"),
    "fish": ("aquarium_fish", "flatfish", "ray", "shark", "trout"),
    "flowers": ("orchid", "poppy", "rose", "sunflower", "tulip"),
    "food containers": ("bottle", "bowl", "can", "cup", "plate"),
    "fruit and vegetables": ("apple", "mushroom", "orange", "pear", "sweet_pepper"),
    "household electrical devices": ("clock", "keyboard", "lamp", "telephone", "television"),
    "household furniture": ("bed", "chair", "couch", "table", "wardrobe"),
    "insects": ("bee", "beetle", "butterfly", "caterpillar", "cockroach"),
    "large carnivores": ("bear", "leopard", "lion", "tiger", "wolf"),
    "large man-made outdoor things": ("bridge", "castle", "house", "road", "skyscraper"),
    "large natural outdoor scenes": ("cloud", "forest", "mountain", "plain", "sea"),
    "large omnivores and herbivores": ("camel", "cattle", "chimpanzee", "elephant", "kangaroo"),
    "medium-sized mammals": ("fox", "porcupine", "possum", "raccoon", "skunk"),
    "non-insect invertebrates": ("crab", "lobster", "snail", "spider", "worm"),
    "people": ("baby", "boy", "girl", "man", "woman"),
    "reptiles": ("crocodile", "dinosaur", "lizard", "snake", "turtle"),
    "small mammals": ("hamster", "mouse", "rabbit", "shrew", "squirrel"),
    "trees": ("maple_tree", "oak_tree", "palm_tree", "pine_tree", "willow_tree"),
    "vehicles 1": ("bicycle", "bus", "motorcycle", "pickup_truck", "train"),
    "vehicles 2": ("lawn_mower", "rocket", "streetcar", "tank", "tractor"),
}
"""Krizhevsky, "Learning multiple layers of features from tiny images", 2009; names as in the data's own files."""


def by_superclass(names: Sequence[str]) -> dict[str, list[int]]:
    """Superclass -> class ids, in the table's order; empty unless these are exactly CIFAR-100's classes."""
    ids = {name.strip().lower().replace(" ", "_"): c for c, name in enumerate(names)}
    wanted = [name for members in SUPERCLASSES.values() for name in members]
    if len(names) != len(wanted) or set(ids) != set(wanted):
        return {}
    return {title: [ids[name] for name in members] for title, members in SUPERCLASSES.items()}
