#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "src/engine/train/batch_packer.h"

namespace weft::engine::piece_split_test {
namespace {

TrainRequest Request(const std::vector<int64_t>& lengths) {
  TrainRequest request;
  for (const int64_t length : lengths) {
    request.data.push_back({.tokens = std::vector<int32_t>(length, 1)});
  }
  return request;
}

TrainPiece All(const TrainRequest& request) {
  return {.request = &request,
          .num_data = static_cast<int64_t>(request.data.size())};
}

// Returns the lengths of the data of each part.
std::vector<std::vector<int64_t>> Lengths(
    const std::vector<std::vector<TrainPiece>>& parts) {
  std::vector<std::vector<int64_t>> lengths;
  for (const std::vector<TrainPiece>& part : parts) {
    lengths.emplace_back();
    for (const TrainPiece& piece : part) {
      for (int64_t d = 0; d < piece.num_data; ++d) {
        lengths.back().push_back(
            piece.request->data[piece.first_datum + d].num_tokens());
      }
    }
  }
  return lengths;
}

using Parts = std::vector<std::vector<int64_t>>;

TEST(PieceSplitTest, OnePartIsAllOfThem) {
  const TrainRequest a = Request({3, 4});
  const TrainRequest b = Request({5});
  const auto parts = SplitPieces({All(a), All(b)}, 1);
  EXPECT_EQ(Lengths(parts), Parts({{3, 4, 5}}));
  EXPECT_EQ(parts[0].size(), 2);
}

TEST(PieceSplitTest, PartsHaveAboutAsManyTokens) {
  const TrainRequest a = Request({8, 8, 8, 8});
  EXPECT_EQ(Lengths(SplitPieces({All(a)}, 2)), Parts({{8, 8}, {8, 8}}));
  const TrainRequest b = Request({30, 2, 2, 2, 20});
  EXPECT_EQ(Lengths(SplitPieces({All(b)}, 2)), Parts({{30}, {2, 2, 2, 20}}));
  const TrainRequest c = Request({2, 2, 2, 30});
  EXPECT_EQ(Lengths(SplitPieces({All(c)}, 3)).back(),
            std::vector<int64_t>({30}));
}

TEST(PieceSplitTest, NoPartIsEmpty) {
  const TrainRequest a = Request({5, 6});
  EXPECT_EQ(Lengths(SplitPieces({All(a)}, 4)), Parts({{5}, {6}}));
}

TEST(PieceSplitTest, APieceKeepsItsAdapterInEveryPart) {
  const TrainRequest a = Request({1, 4, 4});
  TrainPiece piece = All(a);
  piece.first_datum = 1;
  piece.num_data = 2;
  piece.version = std::make_shared<lora::AdapterVersion>();
  const auto parts = SplitPieces({piece}, 2);
  ASSERT_EQ(parts.size(), 2);
  EXPECT_EQ(parts[0][0].first_datum, 1);
  EXPECT_EQ(parts[1][0].first_datum, 2);
  EXPECT_EQ(parts[1][0].request, &a);
  EXPECT_EQ(parts[0][0].version, piece.version);
  EXPECT_EQ(parts[1][0].version, piece.version);
}

}  // namespace
}  // namespace weft::engine::piece_split_test
