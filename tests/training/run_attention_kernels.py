"""Run the training attention's kernels through Triton's interpreter; started by test_attention_triton.py.

TRITON_INTERPRET has to be set before any kernel module is imported, hence a process of its own. Prints a line of JSON a
case: the relative errors of the output and of every gradient against the form that runs on any CPU, in float64.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from nosa_sys.experiments.gradient_checks import FORM_CASES, form_row

if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in FORM_CASES:
        print(json.dumps(form_row("triton", case, torch.device("cpu"))), flush=True)
