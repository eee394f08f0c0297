"""Which test file is a module's own: that of its name, or the one that is listed here, which tests several modules of a kind.

grace_ext/exchange/scheduler.py has tests/exchange/test_scheduler.py, adapters/mpi.py has tests/adapters/mpi/test_mpi.py.
"""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
#: A test file -> the modules without one of their name that it is for, without "grace_ext/" and ".py".
SHARED = {
    "bench/test_bench.py": "bench/{codecs,command,end_to_end,inputs,parts,peers,plot,report,run,subject,variants}",
    "test_cli.py": "{catalogue,inspection,errors}",
    "communicators/test_summing.py": "communicators/{places,slices,_compressed_sums,sharded,tree}",
    "communicators/test_exact_steps.py": "communicators/_alternating",
    "communicators/test_allreduce.py": "communicators/reducible",
    "exchange/test_engine.py": "exchange/{listeners,setup}",
    "federated/test_server.py": "federated/{compression,report,server_state}",
    "index/test_conformance.py": "index/{base,bitmap,raw,varint}",
    "index/test_lossless.py": "index/{_gaps,rice} kernels/varint",
    "kernels/test_bounds.py": "kernels/{_helpers,_intrinsics}",
    "kernels/test_second_moment.py": "kernels/_sums",
    "kernels/test_topk.py": "kernels/_ranks",
    "index/test_rle.py": "kernels/runs",
    "index/test_elias_fano.py": "kernels/elias_fano",
    "index/test_huffman.py": "kernels/{_huffman,byte_huffman,gap_huffman}",
    "index/test_rice_adaptive.py": "kernels/rice_blocks",
    "index/test_row_context.py": "kernels/{_spread,row_context}",
    "index/test_rows.py": "index/_parts",
    "value/test_levels.py": "kernels/{_tables,ans,level_huffman,levels}",
    "value/test_dexp.py": "kernels/dexp",
    "value/test_polyfit.py": "kernels/polyfit",
    "value/test_sketchml.py": "kernels/sketch",
    "value/test_lloyd.py": "kernels/{lloyd,_lloyd_levels}",
    "transforms/test_dct.py": "kernels/{_columns,_cosine,dct} transforms/base",
    "policy/test_allocation.py": "kernels/curves",
    "lowrank/test_powersgd.py": "communicators/factors lowrank/matrices _util/shared_states",
    "memory/test_muon.py": "memory/_by_tensor",
    "memory/test_packed_states.py": "memory/packed_vector",
    "memory/test_residual.py": "memory/{base,optimizer_part}",
    "memory/test_adam.py": "memory/accelerator_part",
    "outer/test_outer.py": "outer/{adam,adamw,base,nesterov,sgd,yogi}",
    "rounds/test_engine.py": "rounds/{timing,turn}",
    "rounds/test_fragment.py": "rounds/header",
    "rounds/test_rank_mean.py": "communicators/separate",
    "observe/test_dispatch.py": "observe/{base,listener,norms}",
    "pipeline/test_conformance.py": "pipeline/{encoded,encoder}",
    "simulate/test_command.py": "simulate/{plot,tasks}",
    "sparsifiers/test_topk.py": "kernels/{_chunk_topk,chunks}",
    "sparsifiers/test_conformance.py": "sparsifiers/{base,dense}",
    "value/test_conformance.py": "value/{_sorting,base,half,raw}",
    "value/test_quantizers.py": "value/_buckets",
    "adapters/mpi/test_mpi.py": "adapters/_common/mpi_exit",
    "exchange/test_stalls.py": "adapters/_horovod/exits exchange/rank_process",
    "adapters/_tensorflow/test_callbacks.py": "adapters/tensorflow_callbacks adapters/_tensorflow/{keras_callback,learning_rate}",
    "adapters/_tensorflow/test_keras_optimizer.py": "adapters/_common/subclassing adapters/_tensorflow/{accumulator,keras_mixins}",
    "adapters/_tensorflow/test_tensorflow.py": "adapters/_horovod/options adapters/_tensorflow/{gradient_tape,names,nodes,options}",
    "adapters/horovod_tensorflow/test_horovod_tensorflow.py": "adapters/_horovod/splits"
    " adapters/_tensorflow/{auto,eager,exchange_graph,reduce,saved_state,transport}",
    "adapters/horovod_torch/test_horovod_torch.py": "adapters/onebit_adam adapters/_torch/"
    "{bucket_sizing,buckets,bypass,device,gradients,hvd_transport,onebit_buckets,output_buffer,parameter_buckets,rows,saved_state,taken,torch_options,wrapped_optimizer}",
    "adapters/horovod_torch/test_gloo_backend.py": "adapters/_torch/{c10d_transport,gloo_transport,horovod_backends} exchange/order",
    "adapters/test_local_adamw.py": "adapters/_torch/host_arrays",
    "adapters/fsdp/test_fsdp.py": "adapters/_torch/{group_exchange,parameter_groups}",
    "adapters/local_steps_keras/test_local_steps_keras.py": "adapters/_tensorflow/model_parameters",
    "adapters/horovod_torch_elastic/test_horovod_torch_elastic.py": "adapters/_torch/{elastic,elastic_rounds,round_member}",
    "adapters/torch_kernels/test_torch_buckets.py": "adapters/_torch/{device_decoder,device_encoder,device_place,device_rows}"
    " adapters/_torch/{device_transform,factor_bucket,kernel_bucket,mailbox,torch_place} adapters/_torch/kernels/rows",
    "adapters/torch_kernels/test_torch_kernels.py": "adapters/_torch/{device_codec,device_selection,device_tables,device_values}"
    " adapters/_torch/packed_vector"
    " adapters/_torch/kernels/{_helpers,_launch,accumulate,at_least,block_topk,dct,half,lowrank,minmax,natural,packed,parts,qsgd}"
    " adapters/_torch/kernels/{lloyd,radix,ranges,rice,signs,sketch,sketchml,tables,ternary,threelc,topk,traffic}",
    "adapters/torch_kernels/test_compiling.py": "adapters/_torch/kernels/{catalogue,compiling}",
    "adapters/torch_kernels/test_device_check.py": "adapters/_torch/device_check adapters/_torch/device_training",
    "adapters/torch_ddp/test_torch_ddp.py": "adapters/_torch/{ddp_buckets,ddp_options,ddp_results,ddp_transport,first_step}",
    "adapters/_flower/test_strategy.py": "adapters/_flower/records",
    "adapters/_flower/test_mod.py": "adapters/_flower/client_state",
    "adapters/jax/test_jax.py": "adapters/_common/mpi_transport adapters/_jax/{gradient_exchange,primitive}",
    "adapters/accelerate/test_accelerate.py": "adapters/_torch/rank_files",
    "adapters/local_steps/test_local_steps.py": "adapters/_horovod/local_rounds adapters/_torch/module_parameters",
}
#: They only keep import paths of earlier versions.
ALIASES = {"capture", "checkpoint", "container", "rng"}


def listed() -> dict[str, str]:
    """Module -> the test file that SHARED names for it."""
    found = {}
    for file, modules in SHARED.items():
        for text in modules.split():
            head, _, names = text.partition("{")
            for name in names.removesuffix("}").split(","):
                assert head + name not in found, f"{head + name} is listed twice"
                found[head + name] = file
    return found


MODULES = sorted(
    ("" if folder == "grace_ext" else "adapters/") + path.relative_to(ROOT / folder).with_suffix("").as_posix()
    for folder in ("grace_ext", "adapters")
    for path in (ROOT / folder).rglob("*.py")
    if path.stem not in ("__init__", "__main__")
)


def of_its_name(module: str) -> Path | None:
    folder, _, stem = module.rpartition("/")
    name = f"test_{stem.lstrip('_')}.py"
    return next((path for path in (TESTS / folder / name, TESTS / folder / stem / name) if path.exists()), None)


@pytest.mark.parametrize("module", [module for module in MODULES if module not in ALIASES])
def test_a_module_has_a_test_file(module):
    own, shared = of_its_name(module), listed().get(module)
    assert own or shared, (
        f"{module} has no test: write tests/{module.rpartition('/')[0]}/test_{module.rpartition('/')[2]}.py"
    )
    assert not (own and shared), f"{module} has a test of its name; SHARED need not list it"
    assert own or (TESTS / shared).exists(), f"there is no tests/{shared}"


def test_what_is_listed_is_there():
    assert sorted(listed().keys() - set(MODULES)) == []
