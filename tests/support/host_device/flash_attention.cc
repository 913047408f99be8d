// LibTorch's flash kernels for packed sequences of any lengths, computed as
// plain attention in f64. In LibTorch they exist only for CUDA.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <cmath>
#include <optional>
#include <tuple>

#include "tests/support/host_device/host_device.h"
#include "tests/support/host_device/host_tensor.h"

namespace weft::testing {
namespace {

using MaybeTensor = std::optional<at::Tensor>;
using MaybeInt = std::optional<int64_t>;

// Legend: n query rows and m key rows of a sequence, H query heads, K heads of
// keys and values, C features.
struct Sequences {
  Sequences(const at::Tensor& query, const at::Tensor& key,
            const at::Tensor& value, const at::Tensor& query_ends,
            const at::Tensor& key_ends, bool is_causal,
            std::optional<double> softmax_scale)
      : q_THC(HostOf(query)),
        k_TKC(HostOf(key)),
        v_TKC(HostOf(value)),
        q_ends(HostOf(query_ends)),
        k_ends(HostOf(key_ends)),
        causal(is_causal),
        scale(softmax_scale.value_or(1 / std::sqrt(query.size(2)))),
        group(query.size(1) / key.size(1)) {
    TORCH_CHECK(
        q_ends.scalar_type() == at::kInt && k_ends.scalar_type() == at::kInt,
        "cumulative lengths are i32");
  }

  int64_t size() const { return q_ends.numel() - 1; }
  static at::Tensor Rows(const at::Tensor& x, const at::Tensor& ends,
                         int64_t i) {
    const auto* end = ends.const_data_ptr<int>();
    return x.narrow(0, end[i], end[i + 1] - end[i]);
  }
  // Returns the query rows of sequence i, [H, n, C].
  at::Tensor Queries(const at::Tensor& x_THC, int64_t i) const {
    return Rows(x_THC, q_ends, i).to(at::kDouble).transpose(0, 1);
  }
  // Returns the key rows of sequence i, repeated for each query head, [H, m,
  // C].
  at::Tensor Keys(const at::Tensor& x_TKC, int64_t i) const {
    return Rows(x_TKC, k_ends, i)
        .to(at::kDouble)
        .transpose(0, 1)
        .repeat_interleave(group, 0);
  }
  // Returns the scores. A causal mask aligns the last query with the last key.
  at::Tensor Scores(int64_t i) const {
    at::Tensor scores_Hnm =
        at::matmul(Queries(q_THC, i), Keys(k_TKC, i).transpose(1, 2)) * scale;
    if (!causal) return scores_Hnm;
    const int64_t n = scores_Hnm.size(1), m = scores_Hnm.size(2);
    return scores_Hnm.masked_fill_(at::ones({n, m}, at::kBool).triu(m - n + 1),
                                   -INFINITY);
  }

  at::Tensor q_THC, k_TKC, v_TKC, q_ends, k_ends;
  bool causal;
  double scale;
  int64_t group;
};

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> Forward(
    const at::Tensor& q_THC, const at::Tensor& k_TKC, const at::Tensor& v_TKC,
    const MaybeTensor& q_ends, const MaybeTensor& k_ends, int64_t, int64_t,
    double, bool causal, bool, std::optional<double> scale, MaybeInt, MaybeInt,
    const MaybeTensor&, const MaybeTensor&) {
  const Sequences all(q_THC, k_TKC, v_TKC, *q_ends, *k_ends, causal, scale);
  at::Tensor out_THC = at::empty_like(q_THC);
  at::Tensor lse_HT = at::empty({q_THC.size(1), q_THC.size(0)},
                                q_THC.options().dtype(at::kFloat));
  at::Tensor out = HostOf(out_THC), lse_TH = HostOf(lse_HT).t();
  for (int64_t i = 0; i < all.size(); ++i) {
    const at::Tensor scores_Hnm = all.Scores(i);
    Sequences::Rows(lse_TH, all.q_ends, i).copy_(scores_Hnm.logsumexp(2).t());
    Sequences::Rows(out, all.q_ends, i)
        .copy_(at::matmul(scores_Hnm.softmax(2), all.Keys(all.v_TKC, i))
                   .transpose(0, 1));
  }
  CurrentEvents().launches.emplace_back("flash attention");
  const at::Tensor none = at::empty({0}, q_THC.options());
  return {out_THC, lse_HT, none, none, none};
}

// Records the launches of LibTorch 2.11: the dot product of the output and its
// gradient, the kernel, the conversion of the queries' gradient from f32, and
// the sums of dk and dv over the query heads that share keys.
void NoteBackwardLaunches(bool has_groups) {
  for (const char* name :
       {"flash attention backward: dot", "flash attention backward",
        "flash attention backward: dq"}) {
    CurrentEvents().launches.emplace_back(name);
  }
  if (!has_groups) return;
  CurrentEvents().launches.emplace_back("flash attention backward: sum of dk");
  CurrentEvents().launches.emplace_back("flash attention backward: sum of dv");
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> Backward(
    const at::Tensor& dout_THC, const at::Tensor& q_THC,
    const at::Tensor& k_TKC, const at::Tensor& v_TKC, const at::Tensor& out_THC,
    const at::Tensor& lse_HT, const at::Tensor& q_ends,
    const at::Tensor& k_ends, int64_t, int64_t, double, bool causal,
    const at::Tensor&, const at::Tensor&, std::optional<double> scale, MaybeInt,
    MaybeInt) {
  const Sequences all(q_THC, k_TKC, v_TKC, q_ends, k_ends, causal, scale);
  at::Tensor dq_THC = at::empty_like(q_THC), dk_TKC = at::empty_like(k_TKC),
             dv_TKC = at::empty_like(v_TKC);
  const at::Tensor dout_host = HostOf(dout_THC), out_host = HostOf(out_THC),
                   lse_TH = HostOf(lse_HT).t();
  const auto store = [&](const at::Tensor& to_TMC, const at::Tensor& ends,
                         int64_t i, const at::Tensor& from_HnC) {
    at::Tensor rows = Sequences::Rows(HostOf(to_TMC), ends, i);
    rows.copy_(
        from_HnC.unflatten(0, {rows.size(1), -1}).sum(1).transpose(0, 1));
  };
  for (int64_t i = 0; i < all.size(); ++i) {
    const at::Tensor dout = all.Queries(dout_host, i);
    const at::Tensor lse_Hn =
        Sequences::Rows(lse_TH, all.q_ends, i).t().to(at::kDouble);
    const at::Tensor p_Hnm = (all.Scores(i) - lse_Hn.unsqueeze(2)).exp_();
    const at::Tensor dot_Hn = (dout * all.Queries(out_host, i)).sum(2, true);
    const at::Tensor dp_Hnm =
        at::matmul(dout, all.Keys(all.v_TKC, i).transpose(1, 2));
    const at::Tensor ds_Hnm = p_Hnm * (dp_Hnm - dot_Hn) * all.scale;
    store(dq_THC, all.q_ends, i, at::matmul(ds_Hnm, all.Keys(all.k_TKC, i)));
    store(dk_TKC, all.k_ends, i,
          at::matmul(ds_Hnm.transpose(1, 2), all.Queries(all.q_THC, i)));
    store(dv_TKC, all.k_ends, i, at::matmul(p_Hnm.transpose(1, 2), dout));
  }
  NoteBackwardLaunches(all.group > 1);
  return {dq_THC, dk_TKC, dv_TKC};
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("_flash_attention_forward", &Forward);
  library.impl("_flash_attention_backward", &Backward);
}

}  // namespace
}  // namespace weft::testing
