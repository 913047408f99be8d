#include "src/engine/train/batch_packer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "src/engine/train/teacher_packer.h"

namespace weft::engine {
namespace {

// A target to score, before targets of equal row, temperature and filter are
// merged into one score row. Targets with a support are not merged.
struct ScoredTarget {
  int64_t row = 0;  // The batch row of the target.
  float temperature = 1;
  float filter = 0;
  int64_t target = 0;
  size_t datum = 0;
  size_t support = 0;  // 0: none. Otherwise the number in Builder::supports_,
                       // counted from 1.
};

using Support = absl::Span<const int32_t>;

// Returns the support of token i's target; empty: the whole vocabulary.
Support SupportOf(const Datum& datum, int64_t i) {
  const std::vector<uint32_t>& offsets = datum.support.offsets;
  if (offsets.empty()) return {};
  return absl::MakeConstSpan(datum.support.tokens)
      .subspan(offsets[i], offsets[i + 1] - offsets[i]);
}

// Builds a packed batch on the host.
class Builder {
 public:
  // `routing_width` is the number of experts of one token, over all layers. It
  // is 0 if no datum has routing.
  Builder(bool share_prompts, size_t routing_width)
      : min_saved_rows_(share_prompts ? kMinSavedRows : kNeverShare),
        routing_width_(routing_width) {
    packed_.rows.row_offsets.push_back(0);
  }

  // Adds the pieces [first, last). All of them use one adapter version.
  void AddSegment(const TrainPiece* first, const TrainPiece* last) {
    const size_t first_datum = packed_.data.size();
    std::vector<absl::Span<const int32_t>> sequences;
    RoutedTokens routed;
    for (const TrainPiece* piece = first; piece != last; ++piece) {
      for (int64_t d = 0; d < piece->num_data; ++d) {
        const Datum& datum = piece->request->data[piece->first_datum + d];
        sequences.push_back(routing_width_ > 0 ? routed.IdsOf(datum)
                                               : datum.tokens);
        packed_.data.push_back({.request = piece->request,
                                .datum = &datum,
                                .rows = {},
                                .entries = {},
                                .spans = {}});
      }
    }
    const auto base = static_cast<int64_t>(tokens_.size());
    PrefixTree tree = BuildPrefixTree(sequences, min_saved_rows_);
    if (routing_width_ > 0) AddRouting(routed, tree);
    AddRows(tree, base);
    for (size_t s = 0; s < sequences.size(); ++s) {
      AddTargets(first_datum + s, tree.spans[s], base);
      for (RowSpan span : tree.spans[s]) {
        span.begin += base;
        packed_.data[first_datum + s].spans.push_back(span);
      }
    }
    if (first->version != nullptr) {
      packed_.batch.routing.push_back(
          {.begin = base,
           .end = static_cast<int64_t>(tokens_.size()),
           .version = first->version});
    }
  }

  PackedTrain Build() && {
    AddScoreRows();
    RouteScoreRows();
    packed_.batch.tokens_T = at::tensor(tokens_, at::kLong);
    packed_.batch.positions_T = at::tensor(positions_, at::kInt);
    if (routing_width_ > 0) {
      packed_.batch.experts_TE =
          at::tensor(experts_, at::kShort)
              .view({-1, static_cast<int64_t>(routing_width_)});
    }
    packed_.score_index_R = at::tensor(score_index_, at::kLong);
    return std::move(packed_);
  }

 private:
  // Replaces each id in tree.tokens by the id's token. Appends the experts of
  // the tree's rows to experts_; -1 means that the router chooses the expert.
  void AddRouting(const RoutedTokens& routed, PrefixTree& tree) {
    for (int32_t& id : tree.tokens) {
      const absl::Span<const uint16_t> routing = routed.routing(id);
      if (routing.empty()) {
        experts_.insert(experts_.end(), routing_width_, int16_t{-1});
      } else {
        experts_.insert(experts_.end(), routing.begin(), routing.end());
      }
      id = routed.token(id);
    }
  }

  void AddRows(const PrefixTree& tree, int64_t base) {
    tokens_.insert(tokens_.end(), tree.tokens.begin(), tree.tokens.end());
    positions_.insert(positions_.end(), tree.positions.begin(),
                      tree.positions.end());
    std::vector<ops::AttentionNode>& nodes = packed_.batch.nodes;
    const auto first_node = static_cast<int64_t>(nodes.size());
    for (ops::AttentionNode node : tree.nodes) {
      node.begin += base;
      node.end += base;
      node.subtree_end += base;
      if (node.parent >= 0) node.parent += first_node;
      nodes.push_back(node);
    }
  }

  void AddTargets(size_t index, const std::vector<RowSpan>& spans,
                  int64_t base) {
    const PackedDatum& packed = packed_.data[index];
    // PackTeachers adds the rows that have a teacher.
    if (HasTeacher(packed.request->loss.function)) return;
    const Datum& datum = *packed.datum;
    const auto temperature =
        static_cast<float>(packed.request->loss.temperature);
    const auto filter =
        static_cast<float>(packed.request->loss.gradient_filter);
    has_filter_ = has_filter_ || filter > 0;
    int64_t i = 0;
    for (const RowSpan& span : spans) {
      for (int64_t r = 0; r < span.count; ++r, ++i) {
        const TargetSpan own = datum.targets_of(i);
        const Support support = SupportOf(datum, i);
        for (int64_t t = own.begin; t < own.end; ++t) {
          if (!IsScored(packed.request->loss, datum, t)) continue;
          scored_.push_back({.row = base + span.begin + r,
                             .temperature = temperature,
                             .filter = filter,
                             .target = datum.targets[t],
                             .datum = index,
                             .support = NumberOf(support)});
        }
      }
    }
  }

  // Keeps the support of a scored target. Returns ScoredTarget::support.
  size_t NumberOf(const Support& support) {
    if (support.empty()) return 0;
    supports_.push_back(support);
    return supports_.size();
  }

  // Gives the last score row the support of this number, unless it is 0.
  void AddSupport(size_t number) {
    if (number == 0) return;
    const Support& support = supports_[number - 1];
    loss::RowSupports& out = packed_.rows.supports;
    if (out.rows.empty()) out.offsets.push_back(0);
    out.rows.push_back(static_cast<int64_t>(packed_.rows.temperatures.size()) -
                       1);
    out.ids.insert(out.ids.end(), support.begin(), support.end());
    out.offsets.push_back(static_cast<int64_t>(out.ids.size()));
  }

  // Makes one score row for each distinct (row, temperature, filter) of scored
  // targets, and for each scored target with a support.
  void AddScoreRows() {
    const auto key = [this](size_t s) {
      return std::tuple(scored_[s].row, scored_[s].temperature,
                        scored_[s].filter, scored_[s].support);
    };
    std::vector<size_t> order(scored_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    if (!std::ranges::is_sorted(order, {}, key)) {
      std::ranges::stable_sort(order, {}, key);
    }
    std::vector<int64_t> entry_of(scored_.size()), row_of(scored_.size());
    loss::ScoreRows& rows = packed_.rows;
    for (size_t place = 0; place < order.size(); ++place) {
      const size_t s = order[place];
      if (place == 0 || key(s) != key(order[place - 1])) {
        if (place > 0) rows.row_offsets.push_back(static_cast<int64_t>(place));
        rows.temperatures.push_back(scored_[s].temperature);
        if (has_filter_) rows.filters.push_back(scored_[s].filter);
        score_index_.push_back(scored_[s].row);
        AddSupport(scored_[s].support);
      }
      rows.targets.push_back(scored_[s].target);
      entry_of[s] = static_cast<int64_t>(place);
      row_of[s] = static_cast<int64_t>(rows.temperatures.size()) - 1;
    }
    if (!order.empty()) {
      rows.row_offsets.push_back(static_cast<int64_t>(order.size()));
    }
    for (size_t s = 0; s < scored_.size(); ++s) {
      PackedDatum& datum = packed_.data[scored_[s].datum];
      datum.entries.push_back(entry_of[s]);
      if (datum.rows.empty() || datum.rows.back() != row_of[s]) {
        datum.rows.push_back(row_of[s]);
      }
    }
  }

  // Computes each segment's range of score rows, and skips segments without
  // score rows. Score rows are in the order of the batch's rows, so the score
  // rows of a segment are consecutive.
  void RouteScoreRows() {
    const auto place = [this](int64_t row) {
      return std::ranges::lower_bound(score_index_, row) - score_index_.begin();
    };
    for (lora::LoraSegment segment : packed_.batch.routing) {
      segment.begin = place(segment.begin);
      segment.end = place(segment.end);
      if (segment.begin < segment.end) packed_.rows.routing.push_back(segment);
    }
  }

  const int64_t min_saved_rows_;
  const size_t routing_width_;
  std::vector<int64_t> tokens_;
  std::vector<int16_t> experts_;  // [rows, routing_width_]
  std::vector<int32_t> positions_;
  std::vector<ScoredTarget> scored_;
  std::vector<Support> supports_;  // Views of the data.
  std::vector<int64_t> score_index_;
  bool has_filter_ = false;
  PackedTrain packed_;
};

// Returns the number of experts of one token over all layers, or 0 if no datum
// has routing.
size_t RoutingWidth(const std::vector<TrainPiece>& pieces) {
  for (const TrainPiece& piece : pieces) {
    for (int64_t d = 0; d < piece.num_data; ++d) {
      const Datum& datum = piece.request->data[piece.first_datum + d];
      if (!datum.routing.empty()) return RoutingOf(datum, 0).size();
    }
  }
  return 0;
}

int64_t NumTokens(const TrainPiece& piece) {
  int64_t tokens = 0;
  for (int64_t d = 0; d < piece.num_data; ++d) {
    const Datum& datum = piece.request->data[piece.first_datum + d];
    tokens += datum.num_tokens() + piece.request->teacher_tokens_of(datum);
  }
  return tokens;
}

}  // namespace

bool IsScored(const LossConfig& loss, const Datum& datum, int64_t target) {
  return loss.score_all || datum.weights.empty() ||
         datum.weights[target] != 0.0f;
}

PackedTrain PackTrain(const std::vector<TrainPiece>& pieces,
                      bool share_prompts) {
  Builder builder(share_prompts, RoutingWidth(pieces));
  for (size_t first = 0; first < pieces.size();) {
    size_t last = first + 1;
    while (last < pieces.size() &&
           pieces[last].version == pieces[first].version) {
      ++last;
    }
    builder.AddSegment(pieces.data() + first, pieces.data() + last);
    first = last;
  }
  PackedTrain packed = std::move(builder).Build();
  PackTeachers(pieces, share_prompts, packed);
  return packed;
}

std::vector<std::vector<TrainPiece>> SplitPieces(
    const std::vector<TrainPiece>& pieces, int num_parts) {
  int64_t left = 0;
  for (const TrainPiece& piece : pieces) left += NumTokens(piece);
  std::vector<std::vector<TrainPiece>> parts(1);
  int64_t taken = 0;  // Tokens of the last part so far.
  for (const TrainPiece& piece : pieces) {
    for (int64_t d = 0; d < piece.num_data; ++d) {
      TrainPiece one = piece;
      one.first_datum += d;
      one.num_data = 1;
      const int64_t tokens = NumTokens(one);
      const auto others = num_parts - static_cast<int64_t>(parts.size());
      // The last part and the parts not yet begun share the remaining tokens
      // equally. If the middle of this datum lies beyond the last part's share,
      // the last part ends before the datum.
      if (taken > 0 && others > 0 &&
          (taken + tokens / 2) * (others + 1) > taken + left) {
        parts.emplace_back();
        taken = 0;
      }
      std::vector<TrainPiece>& part = parts.back();
      if (!part.empty() && part.back().request == one.request &&
          part.back().first_datum + part.back().num_data == one.first_datum) {
        ++part.back().num_data;
      } else {
        part.push_back(std::move(one));
      }
      taken += tokens;
      left -= tokens;
    }
  }
  return parts;
}

}  // namespace weft::engine
