#include "src/engine/batch_packer.h"

#include <ATen/ATen.h>

#include <utility>

namespace weft::engine {
namespace {

// Host-side form of a batch while it grows.
struct Builder {
  std::vector<int64_t> tokens;
  std::vector<int32_t> positions;
  std::vector<int64_t> score_index;
  PackedTrain packed;

  [[nodiscard]] int64_t num_rows() const {
    return static_cast<int64_t>(tokens.size());
  }

  void AddSegment(const TrainPiece& piece, int64_t begin) {
    if (piece.version == nullptr) return;
    lora::LoraRouting& routing = packed.batch.routing;
    if (!routing.empty() && routing.back().version == piece.version &&
        routing.back().end == begin) {
      routing.back().end = num_rows();
      return;
    }
    routing.push_back({.begin = begin,
                       .end = num_rows(),
                       .version = piece.version,
                       .gradient_N = piece.gradient_N});
  }

  void AddScoreRows(const TrainRequest& request, const Datum& datum,
                    int64_t base) {
    loss::ScoreRows& rows = packed.rows;
    for (int64_t i = 0; i < datum.num_tokens(); ++i) {
      const size_t entries_before = rows.targets.size();
      for (int k = 0; k < datum.targets_per_token; ++k) {
        if (!IsScored(datum, i, k)) continue;
        rows.targets.push_back(datum.targets[i * datum.targets_per_token + k]);
      }
      if (rows.targets.size() == entries_before) continue;
      rows.row_offsets.push_back(static_cast<int64_t>(rows.targets.size()));
      rows.temperatures.push_back(static_cast<float>(request.loss.temperature));
      score_index.push_back(base + i);
    }
  }

  void AddDatum(const TrainRequest& request, const Datum& datum) {
    const int64_t base = num_rows();
    packed.data.push_back(
        {.request = &request,
         .datum = &datum,
         .first_row = static_cast<int64_t>(score_index.size()),
         .first_entry = static_cast<int64_t>(packed.rows.targets.size())});
    tokens.insert(tokens.end(), datum.tokens.begin(), datum.tokens.end());
    for (int64_t i = 0; i < datum.num_tokens(); ++i) {
      positions.push_back(static_cast<int32_t>(i));
    }
    packed.batch.nodes.push_back(
        {.begin = base, .end = num_rows(), .subtree_end = num_rows()});
    AddScoreRows(request, datum, base);
  }
};

}  // namespace

bool IsScored(const Datum& datum, int64_t i, int k) {
  return datum.weights.empty() ||
         datum.weights[i * datum.targets_per_token + k] != 0.0f;
}

PackedTrain PackTrain(const std::vector<TrainPiece>& pieces,
                      at::Device device) {
  Builder builder;
  builder.packed.rows.row_offsets.push_back(0);
  for (const TrainPiece& piece : pieces) {
    const int64_t begin = builder.num_rows();
    for (int64_t d = 0; d < piece.num_data; ++d) {
      builder.AddDatum(*piece.request,
                       piece.request->data[piece.first_datum + d]);
    }
    builder.AddSegment(piece, begin);
  }
  PackedTrain packed = std::move(builder.packed);
  packed.batch.tokens_T = at::tensor(builder.tokens, at::kLong).to(device);
  packed.batch.positions_T = at::tensor(builder.positions, at::kInt).to(device);
  packed.score_index_R = at::tensor(builder.score_index, at::kLong).to(device);
  return packed;
}

}  // namespace weft::engine
