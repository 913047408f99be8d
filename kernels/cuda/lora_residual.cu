#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/lora_decode_products.cuh"

namespace weft::kernels::cuda {
namespace few_rows {
namespace {

static_assert(kLoraResidualFeatures == kSpan);

// Blocks per multiprocessor.
constexpr int kPerSm = 2;

struct Memory {
  Slab slabs[1];
  RoundSums<kDecodeWarps> round;
  float squares[kDecodeWarps][kRows];
};

// Writes each row's sum of squares over the tile to squares_TP. `squares` has
// the lane's sums for its two rows.
__device__ void WriteSquares(const LoraResidual& task, const LoraFewRows& rows,
                             int tile, const float (&squares)[2],
                             Memory* memory) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = SumOverRow(squares[half]);
    if (Lane() % 4 == 0) memory->squares[WarpIndex()][OwnRow(half)] = sum;
  }
  __syncthreads();
  const int row = static_cast<int>(threadIdx.x);
  if (row < rows.num_rows) {
    float sum = 0;
    for (int warp = 0; warp < kDecodeWarps; ++warp) {
      sum += memory->squares[warp][row];
    }
    task.squares_TP[(rows.row + row) *
                        TilesOf<kLoraResidualFeatures>(task.hidden) +
                    tile] = sum;
  }
}

// Computes one item: up to 16 rows at kSpan features.
template <bool kAligned, typename PrefetchNext>
__device__ void ResidualItem(const LoraResidual& task, const LoraFewRows& rows,
                             const LoraMatrix& b, const LoraMatrix& a, int tile,
                             PrefetchNext prefetch_next, Memory* memory) {
  const int hidden = static_cast<int>(task.hidden);
  const int own = OwnFeature(tile * kSpan);
  const bool has_norm = task.weight_H != nullptr;
  const auto* weight = static_cast<const Bf16*>(task.weight_H);
  Chunk step[kTiles];
  LoadFirstStep<kAligned>(rows, b, hidden, own, step);
  Round round = {};
  LoadRound<kAligned>(rows, a, hidden, own, 0, round);
  FillSlabs<1>(task.shrunk, rows, &b, memory->slabs);
  // The previous launches wrote y and x, so these loads find them in the cache.
  Chunk y[2], x[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t at = rows.row * task.hidden + OwnRow(half) * hidden;
    const bool exists = OwnRow(half) < rows.num_rows;
    y[half] = Load<kAligned>(static_cast<const Bf16*>(task.y_TH) + at, own,
                             hidden, exists);
    x[half] = Load<kAligned>(static_cast<const Bf16*>(task.x_TH) + at, own,
                             hidden, exists);
  }
  const Chunk factor = Load<kAligned>(weight, own, hidden, has_norm);
  prefetch_next();
  WarpSums sums = {};
  AddExpansion<kAligned>(rows, b, memory->slabs[0], hidden, own, step, sums);
  float squares[2] = {0, 0};
  Chunk scaled[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half * kColumns >= rows.num_rows) break;
    const int64_t at = rows.row * task.hidden + OwnRow(half) * hidden;
    const bool exists = OwnRow(half) < rows.num_rows;
    Chunk sum;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const Bf16 value = Rounded(ElementOf(x[half], i) + ElementOf(y[half], i) +
                                 b.scale * SumOf(sums, half, i));
      const float own_value = ToFloat(value);
      sum.elements[i] = BitsOf(value);
      // Beyond the last feature, all operands are 0 and add nothing.
      squares[half] += own_value * own_value;
      scaled[half].elements[i] =
          BitsOf(Rounded(own_value * ElementOf(factor, i)));
    }
    Save<kAligned>(sum, static_cast<Bf16*>(task.sum_TH) + at, own, hidden,
                   exists);
    Save<kAligned>(scaled[half], Behind(static_cast<Bf16*>(task.scaled_TH), at),
                   own, hidden, exists && has_norm);
  }
  if (!has_norm) return;
  WriteSquares(task, rows, tile, squares, memory);
  WritePart<kAligned>(task.next, rows, a, hidden, own, tile, scaled, round,
                      &memory->round);
}

__global__ void __launch_bounds__(kDecodeThreads, kPerSm)
    ResidualKernel(LoraResidual task, bool rows_are_aligned) {
  __shared__ Memory memory;
  const int tiles = TilesOf<kLoraResidualFeatures>(task.hidden);
  const auto slot_of = [&](int /*tile*/, int k) {
    if (k == 0) return task.slot_of_b;
    return task.next.data == nullptr ? int64_t{-1} : task.slot_of_a;
  };
  const auto prefetch = [&](const Place<2>& place, int tile, int lines) {
    const int first = tile * kSpan;
    const int end = EndOf<kLoraResidualFeatures>(tile, task.hidden);
    PrefetchB(place.rows, place.matrices[0], first, end, lines / 2);
    PrefetchA<kLoraResidualFeatures>(place.rows, place.matrices[1], task.hidden,
                                     first, end, lines / 2);
  };
  ForItems<2>(
      task.table, tiles, slot_of, prefetch,
      [&](const Place<2>& place, int tile, const auto& prefetch_next) {
        const LoraFewRows& rows = place.rows;
        const LoraMatrix& b = place.matrices[0];
        const LoraMatrix& a = place.matrices[1];
        if (rows_are_aligned && BIsAligned(rows, b) &&
            AIsAligned(rows, a, task.hidden)) {
          ResidualItem<true>(task, rows, b, a, tile, prefetch_next, &memory);
        } else {
          ResidualItem<false>(task, rows, b, a, tile, prefetch_next, &memory);
        }
      });
}

}  // namespace
}  // namespace few_rows

cudaError_t RunLoraResidual(const LoraResidual& residual, cudaStream_t stream) {
  using namespace few_rows;
  if (residual.table.max_few == 0 || residual.hidden == 0) return cudaSuccess;
  const bool rows_are_aligned =
      RowsAreAligned({residual.y_TH, residual.x_TH, residual.sum_TH,
                      residual.weight_H, residual.scaled_TH},
                     residual.hidden);
  return LaunchEarly(
      ResidualKernel,
      DecodeGrid<kPerSm>(residual.table, LoraResidualParts(residual.hidden)), 1,
      kDecodeThreads, stream, residual, rows_are_aligned);
}

}  // namespace weft::kernels::cuda
