"""Train with the Trainer and change the strategy between steps, on your own documents.

The next strategy is compiled in the background while the old one trains, so the switch compiles nothing.
"""

import jax
import optax

import dynajax as dj
from dynajax.data import Batches, MemoryDocuments
from dynajax.models import LlamaConfig

jax.config.update("jax_num_cpu_devices", 8)

model = LlamaConfig(layers=2, hidden=32, ffn=64, heads=8, kv_heads=8, head_dim=4, vocab=256, tied=True)
documents = MemoryDocuments.of([f"{a} and {b} make {a + b}.\n" for a in range(20) for b in range(20)])
batches = Batches(documents, batch_size=8, seq_len=64)

trainer = dj.Trainer(model, optax.adam(1e-2), "dp2.tp4", batches, budget="1MB")
first = trainer.step().loss
for strategy in ("fsdp8", "tp4@4-7"):
    preparation = trainer.prepare(strategy)
    for _ in range(10):  # train on meanwhile
        trainer.step()
    preparation.wait()
    report = trainer.switch(strategy)
    assert report.compile_s == 0
    assert report.bytes_moved == report.bytes_lower_bound
    print(f"step {report.step}: {report.source} to {report.target}, {report.bytes_moved:,} bytes moved")
last = [trainer.step().loss for _ in range(5)][-1]
print(f"loss {first:.2f}, then {last:.2f}")
assert last < first
