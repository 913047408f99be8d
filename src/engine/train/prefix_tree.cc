#include "src/engine/train/prefix_tree.h"

#include <algorithm>
#include <numeric>

namespace weft::engine {
namespace {

using Sequence = absl::Span<const int32_t>;

class TreeBuilder {
 public:
  TreeBuilder(const std::vector<Sequence>& sequences, int64_t min_saved_rows)
      : sequences_(sequences), min_saved_rows_(min_saved_rows) {
    tree_.spans.resize(sequences.size());
  }

  PrefixTree Build() && {
    order_.resize(sequences_.size());
    std::iota(order_.begin(), order_.end(), size_t{0});
    if (min_saved_rows_ == kNeverShare) {
      for (size_t place = 0; place < order_.size(); ++place) {
        AddNode(place, place + 1, 0, At(place).size(), /*parent=*/-1);
      }
      return std::move(tree_);
    }
    // After the sort, sequences with a common prefix are adjacent. A prefix
    // that a group's first and last sequences share belongs to the whole group.
    std::ranges::stable_sort(order_, [&](size_t a, size_t b) {
      return std::ranges::lexicographical_compare(sequences_[a], sequences_[b]);
    });
    FindRoots(0, order_.size());
    // Gradients add up in the order of rows. So sequences that share nothing
    // are in the given order, however they are cut into batches.
    std::ranges::sort(roots_, {}, [&](const Group& root) {
      return *std::min_element(order_.begin() + root.first,
                               order_.begin() + root.last);
    });
    for (const Group& root : roots_) {
      AddGroup(root.first, root.last, /*depth=*/0, /*parent=*/-1);
    }
    return std::move(tree_);
  }

 private:
  // The sequences order_[first, last).
  struct Group {
    size_t first, last;
  };

  const Sequence& At(size_t place) const { return sequences_[order_[place]]; }

  // Returns the number of tokens that all sequences of the group begin with.
  // The first `known` of them are equal.
  size_t CommonTokens(size_t first, size_t last, size_t known) const {
    const Sequence& low = At(first);
    const Sequence& high = At(last - 1);
    return std::ranges::mismatch(low.subspan(known), high.subspan(known)).in1 -
           low.begin();
  }

  // Returns whether a node with `count` tokens of the group saves enough rows.
  bool Shares(size_t first, size_t last, size_t count) const {
    return static_cast<int64_t>(count) *
               static_cast<int64_t>(last - first - 1) >=
           min_saved_rows_;
  }

  // Calls visit(first, last) for each part of the group whose sequences have
  // the same next token after `common` tokens, or none.
  template <typename Visit>
  void ForEachBranch(size_t first, size_t last, size_t common, Visit visit) {
    size_t next = first;
    // Sequences that end at the branching point sort first.
    for (; next < last && At(next).size() == common; ++next) {
      visit(next, next + 1);
    }
    while (next < last) {
      const size_t begin = next;
      const int32_t branch = At(begin)[common];
      while (next < last && At(next)[common] == branch) ++next;
      visit(begin, next);
    }
  }

  // Appends to roots_ the parts of the group that share a first node, and the
  // sequences that share none.
  void FindRoots(size_t first, size_t last) {
    if (first == last) return;
    const size_t common = CommonTokens(first, last, /*known=*/0);
    if (last - first == 1 || Shares(first, last, common)) {
      roots_.push_back({first, last});
      return;
    }
    ForEachBranch(first, last, common,
                  [&](size_t begin, size_t end) { FindRoots(begin, end); });
  }

  // Adds rows of the sequences order_[first, last). Their first `depth` tokens
  // are equal and already have rows, in `parent` and its ancestors.
  void AddGroup(size_t first, size_t last, size_t depth, int64_t parent) {
    if (last - first == 1) {
      if (At(first).size() > depth) {
        AddNode(first, last, depth, At(first).size(), parent);
      }
      return;
    }
    const size_t common = CommonTokens(first, last, depth);
    const bool shares = Shares(first, last, common - depth);
    if (shares) parent = AddNode(first, last, depth, common, parent);
    ForEachBranch(first, last, common, [&](size_t begin, size_t end) {
      AddGroup(begin, end, shares ? common : depth, parent);
    });
    if (shares) tree_.nodes[parent].subtree_end = num_rows();
  }

  // Adds a node for the tokens [from, to) that the sequences order_[first,
  // last) have in common. Returns the node's index.
  int64_t AddNode(size_t first, size_t last, size_t from, size_t to,
                  int64_t parent) {
    const int64_t begin = num_rows();
    const Sequence tokens = At(first).subspan(from, to - from);
    tree_.tokens.insert(tree_.tokens.end(), tokens.begin(), tokens.end());
    for (size_t position = from; position < to; ++position) {
      tree_.positions.push_back(static_cast<int32_t>(position));
    }
    for (size_t place = first; place < last; ++place) {
      tree_.spans[order_[place]].push_back(
          {.begin = begin, .count = static_cast<int64_t>(to - from)});
    }
    tree_.nodes.push_back({.begin = begin,
                           .end = num_rows(),
                           .parent = parent,
                           .subtree_end = num_rows()});
    return static_cast<int64_t>(tree_.nodes.size()) - 1;
  }

  int64_t num_rows() const { return static_cast<int64_t>(tree_.tokens.size()); }

  const std::vector<Sequence>& sequences_;
  const int64_t min_saved_rows_;
  std::vector<size_t> order_;
  std::vector<Group> roots_;
  PrefixTree tree_;
};

}  // namespace

PrefixTree BuildPrefixTree(const std::vector<Sequence>& sequences,
                           int64_t min_saved_rows) {
  return TreeBuilder(sequences, min_saved_rows).Build();
}

int64_t AddedRows(const Datum& previous, const Datum& datum) {
  int64_t common = std::ranges::mismatch(previous.tokens, datum.tokens).in1 -
                   previous.tokens.begin();
  if (!previous.routing.empty() || !datum.routing.empty()) {
    for (int64_t i = 0; i < common; ++i) {
      if (RoutingOf(previous, i) != RoutingOf(datum, i)) common = i;
    }
  }
  const int64_t size = datum.num_tokens();
  if (common < kMinSavedRows) return size;
  return std::max<int64_t>(1, size - common);
}

absl::Span<const uint16_t> RoutingOf(const Datum& datum, int64_t index) {
  const size_t width = datum.routing.size() / datum.tokens.size();
  return absl::MakeConstSpan(datum.routing)
      .subspan(static_cast<size_t>(index) * width, width);
}

absl::Span<const int32_t> RoutedTokens::IdsOf(const Datum& datum) {
  std::vector<int32_t>& ids = sequences_.emplace_back();
  ids.reserve(datum.tokens.size());
  for (int64_t i = 0; i < datum.num_tokens(); ++i) {
    const Key key(datum.tokens[i], RoutingOf(datum, i));
    const auto [entry, is_new] =
        ids_.try_emplace(key, static_cast<int32_t>(keys_.size()));
    if (is_new) keys_.push_back(key);
    ids.push_back(entry->second);
  }
  return ids;
}

}  // namespace weft::engine
