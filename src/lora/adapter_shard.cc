#include "src/lora/adapter_shard.h"

#include <ATen/ATen.h>

namespace weft::lora {
namespace {

using parallel::Range;

Range Shifted(const Range& range, int64_t by) {
  return {.begin = range.begin + by, .end = range.end + by};
}

Range Scaled(const Range& range, int64_t by) {
  return {.begin = range.begin * by, .end = range.end * by};
}

const Range& FfnOf(const LoraFactor& factor,
                   const model_config::ShapeRanges& ranges) {
  if (factor.expert == kNoExpert) return ranges.ffn;
  return factor.expert < ranges.num_experts ? ranges.expert_ffn
                                            : ranges.shared_ffn;
}

// Returns the rank's input features. Returns all of them if the ranks do not
// split the inputs.
Range InputsOf(const LoraFactor& factor,
               const model_config::ShapeRanges& ranges) {
  switch (factor.module) {
    case TargetModule::kOProj:
      return ranges.q;
    case TargetModule::kDownProj:
      return FfnOf(factor, ranges);
    case TargetModule::kEmbedTokens:
      return ranges.vocab;
    case TargetModule::kOutProj:
      return ranges.delta_value;
    default:
      return {.begin = 0, .end = factor.in};
  }
}

// Returns the rank's output features, in one range for each kind of feature.
std::vector<Range> OutputsOf(const LoraFactor& factor,
                             const model_config::ShapeRanges& ranges) {
  const model_config::DeltaShape& whole = ranges.delta;
  const Range& heads = ranges.delta_heads;
  switch (factor.module) {
    case TargetModule::kQProj:
      // A gate's rows are beside those of its query head.
      return {Scaled(ranges.q, ranges.q_rows)};
    case TargetModule::kKProj:
    case TargetModule::kVProj:
      return {ranges.kv};
    case TargetModule::kGateProj:
    case TargetModule::kUpProj:
      return {FfnOf(factor, ranges)};
    case TargetModule::kLmHead:
      return {ranges.vocab};
    case TargetModule::kInProjQkv:
    case TargetModule::kInProjQkvz: {
      const Range v = Shifted(ranges.delta_value, 2 * whole.key_width());
      std::vector<Range> parts = {
          ranges.delta_key, Shifted(ranges.delta_key, whole.key_width()), v};
      if (factor.module == TargetModule::kInProjQkvz) {
        parts.push_back(Shifted(v, whole.value_width()));
      }
      return parts;
    }
    case TargetModule::kInProjZ:
      return {ranges.delta_value};
    case TargetModule::kInProjB:
    case TargetModule::kInProjA:
      return {heads};
    case TargetModule::kInProjBa:
      return {heads, Shifted(heads, whole.value_heads)};
    case TargetModule::kOProj:
    case TargetModule::kDownProj:
    case TargetModule::kEmbedTokens:
    case TargetModule::kOutProj:
      break;
  }
  return {{.begin = 0, .end = factor.out}};
}

bool AreOfOneLinear(const LoraFactor& a, const LoraFactor& b) {
  return a.layer == b.layer && a.module == b.module && a.expert == b.expert;
}

}  // namespace

AdapterShard::AdapterShard(const AdapterLayout& whole,
                           const AdapterLayout& local,
                           const model_config::ShapeRanges& ranges)
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
    pieces_.push_back({.whole_offset = of.a_offset,
                       .whole_rows = of.rank,
                       .whole_columns = of.in,
                       .first_column = InputsOf(of, ranges).begin,
                       .local_offset = part.a_offset,
                       .rows = part.rank,
                       .columns = part.in});
    int64_t local_offset = part.b_offset;
    for (const Range& rows : OutputsOf(of, ranges)) {
      pieces_.push_back({.whole_offset = of.b_offset,
                         .whole_rows = of.out,
                         .whole_columns = of.rank,
                         .first_row = rows.begin,
                         .local_offset = local_offset,
                         .rows = rows.size(),
                         .columns = part.rank});
      local_offset += rows.size() * part.rank;
    }
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
