"""FedAvg on CIFAR-10 in MOON's setting, without protofl: plain PyTorch, its own initial weights, draws and augmentation.

python tests/plain_fedavg.py CIFAR10.npz SPLIT.npz ROUNDS LOCAL_EPOCHS SEED prints a line of JSON per round: round, gm.
SPLIT.npz: `protofl partition --dataset cifar10 --save SPLIT.npz` (the samples' positions, one client after the other).
"""

import json
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

MEAN, STD = torch.tensor([125.3, 123.0, 113.9]) / 255, torch.tensor([63.0, 62.1, 66.7]) / 255


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2 = nn.Linear(400, 120), nn.Linear(120, 84)
        self.project1, self.project2, self.head = nn.Linear(84, 84), nn.Linear(84, 256), nn.Linear(256, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        r = F.relu(self.fc2(F.relu(self.fc1(x))))
        return self.head(self.project2(F.relu(self.project1(r))))


def normalised(images):
    return ((images.float() / 255 - MEAN) / STD).permute(0, 3, 1, 2)


def augmented(images):
    """A random window of the image reflected 4 pixels outwards, flipped or not."""
    wide = F.pad(images.permute(0, 3, 1, 2).float(), (4, 4, 4, 4), mode="reflect").permute(0, 2, 3, 1)
    n = len(images)
    rows, columns = torch.randint(0, 9, (2, n, 1)) + torch.arange(32)
    columns = torch.where(torch.rand(n, 1) < 0.5, columns.flip(1), columns)
    return wide[torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]


def train(net, x, y, epochs):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5)
    net.train()
    for _ in range(epochs):
        order = torch.randperm(len(x))
        for i in range(0, max(len(x) - 63, 1), 64):  # the short last batch is dropped
            rows = order[i : i + 64]
            optimizer.zero_grad()
            F.cross_entropy(net(normalised(augmented(x[rows]))), y[rows]).backward()
            optimizer.step()
    return net.state_dict()


def main(data, split, rounds, epochs, seed):
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    with np.load(data) as d, np.load(split) as s:
        x, y = torch.from_numpy(d["x_train"]), torch.from_numpy(d["y_train"]).long()
        x_test, y_test = normalised(torch.from_numpy(d["x_test"])), torch.from_numpy(d["y_test"]).long()
        parts = np.split(s["indices"].astype(np.int64), np.cumsum(s["sizes"])[:-1])
    net = Net()
    for t in range(rounds):
        start = {k: v.clone() for k, v in net.state_dict().items()}
        mean = {k: torch.zeros_like(v) for k, v in start.items()}
        for part in parts:
            net.load_state_dict(start)
            for k, v in train(net, x[part], y[part], epochs).items():
                mean[k] += v * (len(part) / len(x))
        net.load_state_dict(mean)
        with torch.no_grad():
            right = sum(int((net(a).argmax(1) == b).sum()) for a, b in zip(x_test.split(1000), y_test.split(1000)))
        print(json.dumps({"round": t, "gm": right / len(y_test)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
