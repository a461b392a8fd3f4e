# SPDX-License-Identifier: Apache-2.0
"""Where image, VoCo and following tokens stand in one VoCo-LLaMA sequence (EPL, Figure 8)."""

import torch

from context_compressors.modeling.parts.position_layout import uniform_memory_ids


def voco_position_ids(num_image, num_voco, num_following, layout="enhanced", start_id=0):
    end = start_id + num_image
    voco = torch.arange(end, end + num_voco)
    if layout != "default":
        voco = uniform_memory_ids(start_id, num_image, num_voco)
    behind = end if layout == "enhanced" else end + num_voco
    return torch.arange(start_id, end), voco, torch.arange(behind, behind + num_following)
