#include "src/lora/adapter_shard.h"

#include <ATen/ATen.h>

namespace weft::lora {
namespace {

// Where a rank's part of a projection begins: the part's first input feature
// and first output feature.
struct Begin {
  int64_t in = 0;
  int64_t out = 0;
};

Begin BeginOf(const LoraFactor& factor, const ShapeRanges& ranges) {
  const parallel::Range& ffn = factor.expert == kNoExpert ? ranges.ffn
                               : factor.expert < ranges.num_experts
                                   ? ranges.expert_ffn
                                   : ranges.shared_ffn;
  switch (factor.module) {
    case TargetModule::kQProj:
      return {.out = ranges.q.begin};
    case TargetModule::kKProj:
    case TargetModule::kVProj:
      return {.out = ranges.kv.begin};
    case TargetModule::kOProj:
      return {.in = ranges.q.begin};
    case TargetModule::kGateProj:
    case TargetModule::kUpProj:
      return {.out = ffn.begin};
    case TargetModule::kDownProj:
      return {.in = ffn.begin};
    case TargetModule::kLmHead:
      return {.out = ranges.vocab.begin};
    case TargetModule::kEmbedTokens:
      return {.in = ranges.vocab.begin};
  }
  return {};
}

bool AreOfOneLinear(const LoraFactor& a, const LoraFactor& b) {
  return a.layer == b.layer && a.module == b.module && a.expert == b.expert;
}

}  // namespace

AdapterShard::AdapterShard(const AdapterLayout& whole,
                           const AdapterLayout& local,
                           const ShapeRanges& ranges)
    : num_whole_(whole.num_parameters()), num_local_(local.num_parameters()) {
  // `whole` and `local` list their factors in the same order. `local` may lack
  // factors of experts, but no other factors.
  auto next = local.factors().begin();
  const auto check = [&](bool fits) {
    TORCH_CHECK(fits, "layouts of ", whole.factors().size(), " and ",
                local.factors().size(),
                " adapted layers are not of one adapter");
  };
  for (const LoraFactor& of : whole.factors()) {
    if (next == local.factors().end() || !AreOfOneLinear(*next, of)) {
      check(of.expert != kNoExpert);
      continue;
    }
    const LoraFactor& part = *next++;
    const Begin begin = BeginOf(of, ranges);
    pieces_.push_back({.whole_offset = of.a_offset,
                       .whole_rows = of.rank,
                       .whole_columns = of.in,
                       .first_column = begin.in,
                       .local_offset = part.a_offset,
                       .rows = part.rank,
                       .columns = part.in});
    pieces_.push_back({.whole_offset = of.b_offset,
                       .whole_rows = of.out,
                       .whole_columns = of.rank,
                       .first_row = begin.out,
                       .local_offset = part.b_offset,
                       .rows = part.out,
                       .columns = part.rank});
  }
  check(next == local.factors().end());
}

at::Tensor AdapterShard::BlockOf(const at::Tensor& whole_N,
                                 const Piece& piece) {
  return whole_N
      .narrow(0, piece.whole_offset, piece.whole_rows * piece.whole_columns)
      .view({piece.whole_rows, piece.whole_columns})
      .narrow(0, piece.first_row, piece.rows)
      .narrow(1, piece.first_column, piece.columns);
}

at::Tensor AdapterShard::PartOf(const at::Tensor& local_M, const Piece& piece) {
  return local_M.narrow(0, piece.local_offset, piece.rows * piece.columns)
      .view({piece.rows, piece.columns});
}

at::Tensor AdapterShard::Slice(const at::Tensor& whole_N) const {
  TORCH_CHECK(whole_N.numel() == num_whole_, "an adapter of ", num_whole_,
              " parameters was given ", whole_N.numel());
  at::Tensor local_M = at::empty({num_local_}, whole_N.options());
  for (const Piece& piece : pieces_) {
    PartOf(local_M, piece).copy_(BlockOf(whole_N, piece));
  }
  return local_M;
}

void AdapterShard::AddTo(const at::Tensor& local_M, at::Tensor& whole_N) const {
  TORCH_CHECK(local_M.numel() == num_local_ && whole_N.numel() == num_whole_,
              "parts of ", local_M.numel(), " and ", whole_N.numel(),
              " parameters; expected ", num_local_, " and ", num_whole_);
  for (const Piece& piece : pieces_) {
    BlockOf(whole_N, piece).add_(PartOf(local_M, piece));
  }
}

}  // namespace weft::lora
