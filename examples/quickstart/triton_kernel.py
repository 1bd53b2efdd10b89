"""The same script with the Triton kernel where it can run."""

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_triton import TritonEmbeddingBagCollectionSharder, make_planner

STEPS, BATCH, USERS, ITEMS, DIM = 20, 24, 100, 1000, 32


class Model(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name="user", embedding_dim=DIM, num_embeddings=USERS, feature_names=["user"]),
                EmbeddingBagConfig(name="item", embedding_dim=DIM, num_embeddings=ITEMS, feature_names=["seen"]),
            ],
            device=torch.device("meta"),
        )
        self.top = nn.Linear(2 * DIM, 1, device=device)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.top(self.tables(features).values()).squeeze(1)


def batch(device: torch.device) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Each sample has one user and up to four items; even users click."""
    user, lengths = torch.randint(USERS, (BATCH,)), torch.randint(5, (BATCH,))
    seen = torch.randint(ITEMS, (int(lengths.sum()),))
    features = KeyedJaggedTensor(
        keys=["user", "seen"],
        values=torch.cat([user, seen]),
        lengths=torch.cat([torch.ones(BATCH, dtype=torch.int64), lengths]),
    )
    return features.to(device), (user % 2 == 0).float().to(device)


def main() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    model = Model(device)
    fused_params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.5}
    sharders = [TritonEmbeddingBagCollectionSharder(fused_params=fused_params)]
    planner = make_planner("auto", Topology(world_size=1, compute_device=device.type))
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))  # the tables are updated inside the backward
    optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for step in range(STEPS):
        features, clicks = batch(device)
        loss = nn.functional.binary_cross_entropy_with_logits(model(features), clicks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
