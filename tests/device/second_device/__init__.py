"""Everything that computes, on the fake second device: test_second_device.py runs these modules in a process of their
own. The device is installed here, before any generator of the project is made."""

import torch

from tests.device.fake_device import install

DEVICE = install()
torch.set_num_threads(1)
