// Loads models as the daemon does, and computes a pass with each. Reads a
// folder from each line of stdin, and writes a line for it: the SHA-256 of what
// the decoder computes for fixed tokens, and of what the head and the sampler
// take from config.json. Tests compare bits of folders with it: a start of the
// daemon costs ten times as much.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <iostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "src/base/sha256.h"
#include "src/base/status_macros.h"
#include "src/model/decoder.h"
#include "src/model/decoder_weights.h"
#include "src/model_config/model_config.h"
#include "src/ops/matmul.h"
#include "src/weights/checkpoint.h"

namespace weft::model {
namespace {

// The tests' windows and periods end inside the longest sequence.
const std::vector<int64_t> kLengths = {60, 2, 33};

PackedBatch SomeBatch(int64_t vocab) {
  PackedBatch batch;
  std::vector<at::Tensor> positions;
  int64_t begin = 0;
  for (const int64_t length : kLengths) {
    batch.nodes.push_back({begin, begin + length, -1, begin + length});
    positions.push_back(at::arange(length, at::kInt));
    begin += length;
  }
  batch.positions_T = at::cat(positions);
  batch.tokens_T = (at::arange(begin, at::kLong) * 37 + 11).remainder(vocab);
  return batch;
}

std::string_view BytesOf(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

absl::StatusOr<std::string> DigestOf(const std::string& model_dir) {
  WEFT_ASSIGN_OR_RETURN(const model_config::ModelConfig config,
                        model_config::ReadModelConfig(model_dir));
  WEFT_ASSIGN_OR_RETURN(const auto checkpoint,
                        weights::Checkpoint::Open(model_dir));
  WEFT_ASSIGN_OR_RETURN(
      DecoderWeights weights,
      LoadDecoderWeights(*checkpoint, config, at::kFloat, at::kCPU));
  const Decoder decoder(config, std::move(weights), config.max_positions);
  const at::Tensor x_TH =
      decoder.ForwardLayers(Mode::kEval, SomeBatch(config.vocab),
                            /*tape=*/nullptr, /*num_recomputed=*/0,
                            /*kv=*/nullptr);
  const at::Tensor logits_TV =
      ops::Linear(decoder.FinalNorm(x_TH), decoder.weights().head_VH);
  Sha256Sum sum;
  sum.Add(BytesOf(logits_TV.contiguous()));
  sum.Add(absl::StrCat(config.logits_divisor, " ", config.final_softcap, " ",
                       config.max_positions, " ",
                       absl::StrJoin(config.eos_token_ids, ",")));
  return absl::BytesToHexString(sum.Finish());
}

}  // namespace
}  // namespace weft::model

int main() {
  at::set_num_threads(1);
  for (std::string line; std::getline(std::cin, line);) {
    const auto digest = weft::model::DigestOf(line);
    std::cout << (digest.ok() ? *digest : digest.status().ToString())
              << std::endl;
  }
  return 0;
}
