"""Transfers of two GPUs, a process for each, whose domains a network joins: bits, times, and failures, in one command:

    PYTHONPATH=tests/helpers python tests/processes/network_layouts.py --network nvshmem
    PYTHONPATH=tests/helpers python tests/processes/network_layouts.py --network ucx --pace 50,5

Each GPU is an NVLink domain. Results have the bits of loads and stores between the domains, whose times are taken beside, and of the
pure-JAX implementation, but for the gradient of weights. --only NAME runs one of: bits, times, failure, and microbatches only if it is
named: a layer in two chunks, and both passes of one, whose transfers are in flight beside experts or not. --gpus 4 --domain-size 2 has
more GPUs. UCX carries bytes over NVLink; with --pace no faster than so many GB/s, and after so many microseconds.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import tempfile

import launcher  # isort: skip

import network_programs

GPU = {
    "JAX_EP_IMPLEMENTATION": "cuda",
    "JAX_EP_TEST_LOCAL_DEVICES": "{process}",
    "JAX_PLATFORMS": "cuda,cpu",
    # NVLink multicast is not for test machines that others use.
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
# No network card: copies between GPUs, of memory that CUDA IPC shares, and shared memory for flags.
UCX = {"UCX_TLS": "cuda_ipc,cuda_copy,sm,self", "JAX_EP_TEST_IPC": "1"}


def run(name: str, network: str, arguments: argparse.Namespace, folder: str = "") -> None:
    options = [
        "--folder",
        folder,
        "--domain-size",
        str(arguments.domain_size),
        "--timeout",
        str(arguments.timeout),
    ]
    command = [__file__, "--child", name, *options]
    variables = GPU | {"JAX_EP_NETWORK": network, "JAX_EP_DEBUG": "1"}
    if network == "ucx":
        variables |= UCX | {"JAX_EP_TEST_PACE": arguments.pace}
    if name == "failure":
        variables |= {"JAX_EP_ENTRY_TIMEOUT_S": "5", "JAX_EP_PROGRESS_TIMEOUT_S": "5"}
    results = launcher.run(
        command, processes=arguments.gpus, environment=variables, timeout=arguments.timeout
    )
    for process, result in enumerate(results):
        kept = ("TIME", "BITS", "RELEASED", "FAILURE", "RIGHT")
        lines = result.output.splitlines()
        shown = [
            line
            for line in lines
            if line.startswith(kept) or network.upper() in line or "probed" in line
        ]
        print(*(f"[{network} {process}] {line}" for line in shown[:60]), sep="\n", flush=True)
        if result.status != 0:
            print(result.output[-6000:], flush=True)
            raise SystemExit(f"{name} with {network}: process {process} ended with {result.status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--network", default="nvshmem", choices=("nvshmem", "ucx"))
    parser.add_argument("--pace", default="", metavar="GB/S,US", help="UCX: as JAX_EP_TEST_PACE")
    parser.add_argument("--only", default="")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--domain-size", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=150, help="seconds of each run")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        faulthandler.dump_traceback_later(arguments.timeout - 10)  # says where it hangs
    if arguments.child == "bits":
        return network_programs.bits(arguments.folder, arguments.domain_size)
    if arguments.child:
        return getattr(network_programs, arguments.child)(arguments.domain_size)
    import numpy as np

    networks = (arguments.network, "none")
    if arguments.only in ("", "bits"):
        with tempfile.TemporaryDirectory() as parent:
            found = {}
            for network in networks:
                folder = os.path.join(parent, network)
                os.mkdir(folder)
                run("bits", network, arguments, folder)
                found[network] = [dict(np.load(f"{folder}/{p}.npz")) for p in range(arguments.gpus)]
            for process, (over, direct) in enumerate(zip(*found.values(), strict=True)):
                wrong = [
                    name for name, value in direct.items() if not np.array_equal(value, over[name])
                ]
                print(
                    f"COMPARED process {process}: {len(direct)} results, {len(wrong)} differ {wrong[:5]}",
                    flush=True,
                )
                if wrong:
                    raise SystemExit(1)
    for name in ("times", "failure"):
        if arguments.only in ("", name):
            for network in networks[:1] if arguments.pace else networks:
                run(name, network, arguments)
    if arguments.only == "microbatches":
        run("microbatches", arguments.network, arguments)
    print("OK", flush=True)


if __name__ == "__main__":
    sys.exit(main())
