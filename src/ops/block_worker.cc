#include "src/ops/block_worker.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "src/ops/bf16_product.h"

namespace weft::ops {
namespace {

// The most keys of a chunk, so that the chunk's scores stay in a core's cache.
constexpr int64_t kMaxChunkKeys = 512;

// A tensor [T, heads, C] with unit stride in C, or a tensor [T, heads].
template <typename Real>
struct HeadRows {
  explicit HeadRows(const at::Tensor& x_TMC)
      : data(x_TMC.mutable_data_ptr<Real>()),
        row_stride(x_TMC.stride(0)),
        head_stride(x_TMC.stride(1)) {}

  [[nodiscard]] Real* At(int64_t row, int64_t head) const {
    return data + row * row_stride + head * head_stride;
  }

  Real* data;
  int64_t row_stride;
  int64_t head_stride;
};

std::vector<Chunk> ChunksOf(const AttentionBlock& block) {
  std::vector<Chunk> chunks;
  int64_t first = 0;
  for (const RowRange& range : block.keys) {
    for (int64_t done = 0; done < range.size; done += kMaxChunkKeys) {
      const int64_t size = std::min(kMaxChunkKeys, range.size - done);
      chunks.push_back({{range.begin + done, size}, first});
      first += size;
    }
  }
  return chunks;
}

template <typename Real>
Real* Data(const at::Tensor& x) {
  return x.mutable_data_ptr<Real>();
}

}  // namespace

int64_t ChunkKeys(const std::vector<AttentionBlock>& blocks) {
  int64_t longest = 0;
  for (const AttentionBlock& block : blocks) {
    for (const RowRange& range : block.keys) {
      longest = std::max(longest, range.size);
    }
  }
  constexpr int64_t kPadding = kernels::cpu::kSoftmaxPadding;
  return std::min(kMaxChunkKeys,
                  (longest + kPadding - 1) / kPadding * kPadding);
}

template <typename Real>
BlockWorker<Real>::BlockWorker(const AttentionInputs& inputs,
                               int64_t block_rows, int64_t chunk_keys)
    : inputs_(inputs),
      group_(inputs.q_THC.size(1) / inputs.k_TKC.size(1)),
      features_(inputs.q_THC.size(2)),
      chunk_keys_(chunk_keys),
      softcap_(static_cast<Real>(inputs.rule.softcap)) {
  const int64_t rows = group_ * block_rows;
  const auto options = inputs.q_THC.options();
  q_MC_ = at::empty({rows, features_}, options);
  sum_MC_ = at::empty({rows, features_}, options);
  scores_MS_ = at::empty({rows, chunk_keys_}, options);
  states_.resize(rows);
  lse_.resize(rows);
  delta_.resize(rows);
  if (AreBf16ProductsAllowed() && std::is_same_v<Real, float>) {
    rounded_.emplace();
  }
}

template <typename Real>
void BlockWorker<Real>::Multiply(at::Tensor out, const at::Tensor& a,
                                 const at::Tensor& b, bool adds, double alpha) {
  if constexpr (std::is_same_v<Real, float>) {
    panels_.Multiply(out, a, b, adds, alpha);
  } else {
    // If beta is 0, addmm_out does not read the old `out`.
    at::addmm_out(out, out, a, b, /*beta=*/adds ? 1 : 0, alpha);
  }
}

template <typename Real>
void BlockWorker<Real>::MultiplyGradient(const at::Tensor& out,
                                         const at::Tensor& a,
                                         const at::Tensor& b, bool adds,
                                         double alpha) {
  if (rounded_.has_value()) {
    rounded_->Multiply(out, a, b, adds, alpha);
  } else {
    Multiply(out, a, b, adds, alpha);
  }
}

template <typename Real>
at::Tensor BlockWorker<Real>::Gather(const at::Tensor& x_THC,
                                     const AttentionBlock& block,
                                     int64_t kv_head,
                                     const at::Tensor& scratch_MC) const {
  if (group_ == 1) {
    return x_THC.select(1, kv_head)
        .narrow(0, block.queries.begin, block.queries.size);
  }
  const HeadRows<Real> x(x_THC);
  Real* const rows = Data<Real>(scratch_MC);
  ForRows(block, kv_head, [&](int64_t m, int64_t row, int64_t head) {
    std::copy_n(x.At(row, head), features_, rows + m * features_);
  });
  return scratch_MC.narrow(0, 0, group_ * block.queries.size);
}

template <typename Real>
SoftmaxKeys BlockWorker<Real>::VisibleKeys(const AttentionBlock& block,
                                           const Chunk& chunk, int64_t num_keys,
                                           int64_t i) const {
  const int64_t end = num_keys - block.queries.size + i + 1 - chunk.first;
  const int64_t window = inputs_.rule.window;
  const int64_t begin = window > 0 ? end - window : 0;
  const int64_t size = chunk.rows.size;
  return {.begin = std::clamp<int64_t>(begin, 0, size),
          .end = std::clamp<int64_t>(end, 0, size),
          .size = size};
}

template <typename Real>
void BlockWorker<Real>::Forward(const AttentionBlock& block, int64_t kv_head,
                                AttentionOutput& result) {
  const int64_t rows = group_ * block.queries.size;
  const int64_t num_keys = block.num_keys();
  const at::Tensor q = Gather(inputs_.q_THC, block, kv_head, q_MC_);
  at::Tensor sum = sum_MC_.narrow(0, 0, rows);
  Real* const sums = Data<Real>(sum_MC_);
  Real* const score_rows = Data<Real>(scores_MS_);
  std::fill_n(states_.begin(), rows, typename SoftmaxRow<Real>::State());
  for (const Chunk& chunk : ChunksOf(block)) {
    at::Tensor scores =
        scores_MS_.narrow(0, 0, rows).narrow(1, 0, chunk.rows.size);
    Multiply(scores, q, Keys(inputs_.k_TKC, chunk, kv_head).t(),
             /*adds=*/false, inputs_.rule.scale);
    for (int64_t m = 0; m < rows; ++m) {
      const Real shrink = SoftmaxRow<Real>::Step(
          VisibleKeys(block, chunk, num_keys, m % block.queries.size), softcap_,
          score_rows + m * chunk_keys_, &states_[m]);
      if (chunk.first == 0 || shrink == 1) continue;
      Scale(sums + m * features_, shrink, sums + m * features_);
    }
    Multiply(sum, scores, Keys(inputs_.v_TKC, chunk, kv_head),
             /*adds=*/chunk.first > 0, 1);
  }
  const HeadRows<Real> out(result.out_THC);
  ForRows(block, kv_head, [&](int64_t m, int64_t row, int64_t head) {
    Scale(sums + m * features_, 1 / states_[m].sum, out.At(row, head));
  });
  const HeadRows<Real> lse(result.lse_TH);
  ForRows(block, kv_head, [&](int64_t m, int64_t row, int64_t head) {
    *lse.At(row, head) = states_[m].max + std::log(states_[m].sum);
  });
}

template <typename Real>
void BlockWorker<Real>::ReadForward(const AttentionBlock& block,
                                    int64_t kv_head, const at::Tensor& dout_MC,
                                    const AttentionOutput& forward) {
  const HeadRows<Real> outs(forward.out_THC);
  const HeadRows<Real> lse(forward.lse_TH);
  ForRows(block, kv_head, [&](int64_t m, int64_t row, int64_t head) {
    const Real* dout = Data<Real>(dout_MC) + m * dout_MC.stride(0);
    const Real* out = outs.At(row, head);
    Real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < features_; ++c) sum += dout[c] * out[c];
    delta_[m] = sum;
    lse_[m] = *lse.At(row, head);
  });
}

template <typename Real>
void BlockWorker<Real>::Backward(const AttentionBlock& block, int64_t kv_head,
                                 const at::Tensor& dout_THC,
                                 const AttentionOutput& forward,
                                 at::Tensor& dq_THC, const at::Tensor& dk_TKC,
                                 const at::Tensor& dv_TKC) {
  const int64_t rows = group_ * block.queries.size;
  const int64_t num_keys = block.num_keys();
  const double scale = inputs_.rule.scale;
  if (!dweights_MS_.defined()) {
    dout_MC_ = at::empty_like(q_MC_);
    dweights_MS_ = at::empty_like(scores_MS_);
  }
  const at::Tensor q = Gather(inputs_.q_THC, block, kv_head, q_MC_);
  const at::Tensor dout = Gather(dout_THC, block, kv_head, dout_MC_);
  ReadForward(block, kv_head, dout, forward);
  at::Tensor dq = sum_MC_.narrow(0, 0, rows);
  Real* const score_rows = Data<Real>(scores_MS_);
  Real* const dweight_rows = Data<Real>(dweights_MS_);
  for (const Chunk& chunk : ChunksOf(block)) {
    const auto chunk_of = [&](const at::Tensor& x_MS) {
      return x_MS.narrow(0, 0, rows).narrow(1, 0, chunk.rows.size);
    };
    at::Tensor weights = chunk_of(scores_MS_);
    at::Tensor dscores = chunk_of(dweights_MS_);
    const at::Tensor k = Keys(inputs_.k_TKC, chunk, kv_head);
    Multiply(weights, q, k.t(), /*adds=*/false, scale);
    Multiply(dscores, dout, Keys(inputs_.v_TKC, chunk, kv_head).t(),
             /*adds=*/false, 1);
    for (int64_t m = 0; m < rows; ++m) {
      SoftmaxRow<Real>::Gradient(
          VisibleKeys(block, chunk, num_keys, m % block.queries.size), softcap_,
          lse_[m], delta_[m], score_rows + m * chunk_keys_,
          dweight_rows + m * chunk_keys_);
    }
    MultiplyGradient(Keys(dv_TKC, chunk, kv_head), weights.t(), dout,
                     /*adds=*/true, 1);
    MultiplyGradient(Keys(dk_TKC, chunk, kv_head), dscores.t(), q,
                     /*adds=*/true, scale);
    MultiplyGradient(dq, dscores, k, /*adds=*/chunk.first > 0, scale);
  }
  const HeadRows<Real> dq_rows(dq_THC);
  const Real* const sums = Data<Real>(sum_MC_);
  ForRows(block, kv_head, [&](int64_t m, int64_t row, int64_t head) {
    std::copy_n(sums + m * features_, features_, dq_rows.At(row, head));
  });
}

template class BlockWorker<float>;
template class BlockWorker<double>;

}  // namespace weft::ops
