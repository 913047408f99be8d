// Packed batches of prefix trees, for tests of operators that take them.
#ifndef WEFT_TESTS_OPS_TREE_PACK_H_
#define WEFT_TESTS_OPS_TREE_PACK_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "src/ops/tree_attention.h"

namespace weft::testing {

struct Pack {
  std::string name;
  std::vector<ops::AttentionNode> nodes;

  int64_t num_rows() const { return nodes.back().end; }
};

// Makes nodes from their lengths and parents, in depth-first order.
inline Pack Tree(
    const std::string& name,
    const std::vector<std::pair<int64_t, int64_t>>& length_and_parent) {
  Pack pack{name, {}};
  int64_t row = 0;
  for (const auto& [length, parent] : length_and_parent) {
    pack.nodes.push_back({row, row + length, parent, row + length});
    row += length;
    for (int64_t n = parent; n >= 0; n = pack.nodes[n].parent) {
      pack.nodes[n].subtree_end = row;
    }
  }
  return pack;
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_OPS_TREE_PACK_H_
