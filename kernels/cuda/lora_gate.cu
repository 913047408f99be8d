#include "kernels/cuda/gated_product.cuh"
#include "kernels/cuda/lora_decode_products.cuh"

namespace weft::kernels::cuda {
namespace few_rows {
namespace {

// Blocks per multiprocessor.
constexpr int kPerSm = 2;
// An item is two spans of kSpan features, computed one after the other, so that
// the shrink for down has few parts. A span has both sides: gate and up.
constexpr int kSpans = 2;
static_assert(kLoraGateFeatures == kSpans * kSpan);
constexpr int kSides = 2;

// An entry's matrices: 0 is B of gate, 1 is B of up, and kA is A of down.
constexpr int kA = 2;
constexpr int kMatrices = 3;

struct Memory {
  Slab slabs[kSides];
  RoundSums round;
};

// Computes the gated product for the lane's two rows, at the lane's 8 features
// from `own` on. Stores it, and leaves it in `out`.
template <GateActivation kActivation, bool kAligned>
__device__ void GateSpan(const LoraGate& task, const LoraFewRows& rows,
                         const LoraMatrix (&matrices)[kMatrices],
                         const float (&factors)[2], int own,
                         const Slab (&slabs)[kSides], Chunk (&out)[2]) {
  const int features = static_cast<int>(task.features);
  WarpSums sums[kSides] = {};
  AddExpansion<kAligned, false>(rows, matrices[0], slabs[0], features, own,
                                sums[0]);
  Chunk product[kSides][2];
#pragma unroll
  for (int side = 0; side < kSides; ++side) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      product[side][half] = Load<kAligned>(
          static_cast<const Bf16*>(task.gate_up_T2F) +
              ((rows.row + OwnRow(half)) * kSides + side) * task.features,
          own, features, OwnRow(half) < rows.num_rows);
    }
  }
  AddExpansion<kAligned, false>(rows, matrices[1], slabs[1], features, own,
                                sums[1]);
  Chunk bias[kSides];
#pragma unroll
  for (int side = 0; side < kSides; ++side) {
    bias[side] = Load<kAligned>(
        Behind(static_cast<const Bf16*>(task.bias_2F), side * task.features),
        own, features, task.bias_2F != nullptr);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
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
                   static_cast<Bf16*>(task.out_TF) +
                       (rows.row + OwnRow(half)) * task.features,
                   own, features, OwnRow(half) < rows.num_rows);
  }
}

// Computes one item: up to 16 rows at kLoraGateFeatures features.
template <GateActivation kActivation, bool kAligned>
__device__ void GateItem(const LoraGate& task, const LoraFewRows& rows,
                         const LoraMatrix (&matrices)[kMatrices], int tile,
                         Memory* memory) {
  const int features = static_cast<int>(task.features);
  const int own = OwnFeature(tile * static_cast<int>(kLoraGateFeatures));
  FillSlabs<kSides>(task.shrunk, rows, matrices, memory->slabs);
  float factors[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    factors[half] = FactorOf(task.norm, rows.row + OwnRow(half),
                             OwnRow(half) < rows.num_rows);
  }
  Chunk out[kSpans][2] = {};
  // The loop is not unrolled, so that its code exists once. Each iteration
  // first moves the results of the previous one from out[1] to out[0].
#pragma unroll 1
  for (int s = 0; s < kSpans; ++s) {
#pragma unroll
    for (int half = 0; half < 2; ++half) out[0][half] = out[1][half];
    GateSpan<kActivation, kAligned>(task, rows, matrices, factors,
                                    own + s * kSpan, memory->slabs, out[1]);
  }
  Round rounds[kSpans] = {};
#pragma unroll
  for (int s = 0; s < kSpans; ++s) {
    LoadRound<kAligned>(rows, matrices[kA], features, own + s * kSpan, 0,
                        rounds[s]);
  }
  WritePart<kAligned>(task.down, rows, matrices[kA], features, own, tile, out,
                      rounds, &memory->round);
}

template <GateActivation kActivation>
__global__ void __launch_bounds__(kDecodeThreads, kPerSm)
    GateKernel(LoraGate task, bool rows_are_aligned) {
  __shared__ Memory memory;
  const int tiles = TilesOf<kLoraGateFeatures>(task.features);
  const auto slot_of = [&](int /*tile*/, int k) {
    if (k < kA) return task.slots_of_b[k];
    return task.down.data == nullptr ? int64_t{-1} : task.slot_of_a;
  };
  ForItems<kMatrices>(
      task.table, tiles, slot_of,
      [&](const Place<kMatrices>& place, int tile, int lines) {
        const LoraFewRows& rows = place.rows;
        const LoraMatrix(&matrices)[kMatrices] = place.matrices;
        const int first = tile * static_cast<int>(kLoraGateFeatures);
        const int end = EndOf<kLoraGateFeatures>(tile, task.features);
        PrefetchB(rows, matrices[0], first, end, lines / kMatrices);
        PrefetchB(rows, matrices[1], first, end, lines / kMatrices);
        PrefetchA(rows, matrices[kA], task.features, first, end,
                  lines / kMatrices);
        if (rows_are_aligned && BIsAligned(rows, matrices[0]) &&
            BIsAligned(rows, matrices[1]) &&
            AIsAligned(rows, matrices[kA], task.features)) {
          GateItem<kActivation, true>(task, rows, matrices, tile, &memory);
        } else {
          GateItem<kActivation, false>(task, rows, matrices, tile, &memory);
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
  return Launch(kernel,
                DecodeGrid<kPerSm>(gate.table, LoraGateParts(gate.features)), 1,
                kDecodeThreads, stream, gate, rows_are_aligned);
}

}  // namespace weft::kernels::cuda
