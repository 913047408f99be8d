#include "kernels/cuda/gated_product.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/lora_decode_products.cuh"

namespace weft::kernels::cuda {
namespace few_rows {
namespace {

// Each warp of a block computes kWarpFeatures features of gate and the same
// features of up.
constexpr int kGateWarps = 16;
constexpr unsigned kGateThreads = kGateWarps * kWarp;
static_assert(kLoraGateFeatures == kGateWarps * kWarpFeatures);
// Blocks per multiprocessor.
constexpr int kPerSm = 1;
constexpr int kSides = 2;  // Gate and up.

// An entry's matrices: 0 is B of gate, 1 is B of up, and kA is A of down.
constexpr int kA = 2;
constexpr int kMatrices = 3;

struct Memory {
  Slab slabs[kSides];
  RoundSums<kGateWarps> round;
};

// The lane's elements of gate and of up, for its two rows.
using SideRows = Chunk[kSides][2];

template <bool kAligned>
__device__ void LoadRows(const LoraGate& task, const LoraFewRows& rows, int own,
                         SideRows& product) {
  const int features = static_cast<int>(task.features);
  const Bf16* from = static_cast<const Bf16*>(task.gate_up_T2F) +
                     rows.row * kSides * task.features;
#pragma unroll
  for (int side = 0; side < kSides; ++side) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      product[side][half] =
          Load<kAligned>(from + (OwnRow(half) * kSides + side) * features, own,
                         features, OwnRow(half) < rows.num_rows);
    }
  }
}

// Computes the gated product for the lane's two rows, at the lane's 8 features
// from `own` on. Stores it, and leaves it in `out`. `sums` has S B^T.
template <GateActivation kActivation, bool kAligned>
__device__ void ActivateRows(const LoraGate& task, const LoraFewRows& rows,
                             const LoraMatrix (&matrices)[kMatrices],
                             const float (&factors)[2], int own,
                             const SideRows& product,
                             const WarpSums (&sums)[kSides], Chunk (&out)[2]) {
  const int features = static_cast<int>(task.features);
  Chunk bias[kSides];
#pragma unroll
  for (int side = 0; side < kSides; ++side) {
    bias[side] = Load<kAligned>(
        Behind(static_cast<const Bf16*>(task.bias_2F), side * task.features),
        own, features, task.bias_2F != nullptr);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half * kColumns >= rows.num_rows) break;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      float values[kSides];
#pragma unroll
      for (int side = 0; side < kSides; ++side) {
        values[side] = factors[half] *
                           (ElementOf(product[side][half], i) +
                            matrices[side].scale * SumOf(sums[side], half, i)) +
                       ElementOf(bias[side], i);
      }
      out[half].elements[i] =
          BitsOf(Rounded(Activate<kActivation>(values[0]).value *
                         Factor<kActivation>(values[1]).value));
    }
    Save<kAligned>(out[half],
                   static_cast<Bf16*>(task.out_TF) + rows.row * task.features +
                       OwnRow(half) * features,
                   own, features, OwnRow(half) < rows.num_rows);
  }
}

// Computes one item: up to 16 rows at kLoraGateFeatures features.
template <GateActivation kActivation, bool kAligned, typename PrefetchNext>
__device__ void GateItem(const LoraGate& task, const LoraFewRows& rows,
                         const LoraMatrix (&matrices)[kMatrices], int tile,
                         PrefetchNext prefetch_next, Memory* memory) {
  const int features = static_cast<int>(task.features);
  const int own = OwnFeature(tile * static_cast<int>(kLoraGateFeatures));
  Chunk steps[kSides][kTiles];
#pragma unroll
  for (int side = 0; side < kSides; ++side) {
    LoadFirstStep<kAligned>(rows, matrices[side], features, own, steps[side]);
  }
  Round round = {};
  LoadRound<kAligned>(rows, matrices[kA], features, own, 0, round);
  FillSlabs<kSides>(task.shrunk, rows, matrices, memory->slabs);
  prefetch_next();
  WarpSums sums[kSides] = {};
  AddExpansion<kAligned>(rows, matrices[0], memory->slabs[0], features, own,
                         steps[0], sums[0]);
  // The previous launches wrote the rows and their squares, so these loads find
  // them in the cache. The loads come after gate's expansion, which frees the
  // registers of steps[0] for them.
  SideRows product;
  LoadRows<kAligned>(task, rows, own, product);
  Squares squares[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    squares[half] = LoadSquares(task.norm, rows.row + OwnRow(half),
                                OwnRow(half) < rows.num_rows);
  }
  AddExpansion<kAligned>(rows, matrices[1], memory->slabs[1], features, own,
                         steps[1], sums[1]);
  float factors[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    factors[half] = FactorOf(task.norm, rows.row + OwnRow(half),
                             OwnRow(half) < rows.num_rows, squares[half]);
  }
  Chunk out[2] = {};
  ActivateRows<kActivation, kAligned>(task, rows, matrices, factors, own,
                                      product, sums, out);
  WritePart<kAligned>(task.down, rows, matrices[kA], features, own, tile, out,
                      round, &memory->round);
}

template <GateActivation kActivation>
__global__ void __launch_bounds__(kGateThreads, kPerSm)
    GateKernel(LoraGate task, bool rows_are_aligned) {
  __shared__ Memory memory;
  const int tiles = TilesOf<kLoraGateFeatures>(task.features);
  const auto slot_of = [&](int /*tile*/, int k) {
    if (k < kA) return task.slots_of_b[k];
    return task.down.data == nullptr ? int64_t{-1} : task.slot_of_a;
  };
  const auto prefetch = [&](const Place<kMatrices>& place, int tile,
                            int lines) {
    const int first = tile * static_cast<int>(kLoraGateFeatures);
    const int end = EndOf<kLoraGateFeatures>(tile, task.features);
    for (int side = 0; side < kSides; ++side) {
      PrefetchB(place.rows, place.matrices[side], first, end,
                lines / kMatrices);
    }
    PrefetchA<kLoraGateFeatures>(place.rows, place.matrices[kA], task.features,
                                 first, end, lines / kMatrices);
  };
  ForItems<kMatrices>(
      task.table, tiles, slot_of, prefetch,
      [&](const Place<kMatrices>& place, int tile, const auto& prefetch_next) {
        const LoraFewRows& rows = place.rows;
        const LoraMatrix(&matrices)[kMatrices] = place.matrices;
        if (rows_are_aligned && BIsAligned(rows, matrices[0]) &&
            BIsAligned(rows, matrices[1]) &&
            AIsAligned(rows, matrices[kA], task.features)) {
          GateItem<kActivation, true>(task, rows, matrices, tile, prefetch_next,
                                      &memory);
        } else {
          GateItem<kActivation, false>(task, rows, matrices, tile,
                                       prefetch_next, &memory);
        }
      });
}

}  // namespace
}  // namespace few_rows

cudaError_t RunLoraGate(const LoraGate& gate, cudaStream_t stream) {
  using namespace few_rows;
  if (gate.table.max_few == 0 || gate.features == 0) return cudaSuccess;
  const bool rows_are_aligned = RowsAreAligned(
      {gate.gate_up_T2F, gate.bias_2F, gate.out_TF}, gate.features);
  auto* kernel = GateKernel<GateActivation::kSilu>;
  if (gate.activation == GateActivation::kGeluTanh) {
    kernel = GateKernel<GateActivation::kGeluTanh>;
  } else if (gate.activation == GateActivation::kClampedSilu) {
    kernel = GateKernel<GateActivation::kClampedSilu>;
  }
  return LaunchEarly(
      kernel, DecodeGrid<kPerSm>(gate.table, LoraGateParts(gate.features)), 1,
      kGateThreads, stream, gate, rows_are_aligned);
}

}  // namespace weft::kernels::cuda
