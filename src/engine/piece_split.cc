#include "src/engine/piece_split.h"

#include <utility>

namespace weft::engine {
namespace {

int64_t NumTokens(const TrainPiece& piece) {
  int64_t tokens = 0;
  for (int64_t d = 0; d < piece.num_data; ++d) {
    tokens += piece.request->data[piece.first_datum + d].num_tokens();
  }
  return tokens;
}

}  // namespace

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
