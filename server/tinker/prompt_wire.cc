#include "server/tinker/prompt_wire.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/field_checks.h"
#include "server/tinker/tensor.h"
#include "src/base/status_macros.h"

namespace weft::tinker {
namespace {

constexpr char kTargets[] = "target_prompt_logprobs";
// The value of a cell that asks for nothing.
constexpr int64_t kNoTarget = -1;

}  // namespace

absl::StatusOr<Tensor> ReadTargets(const Json& body, v1::SampleRequest* out) {
  const Json* const json = Find(body, kTargets);
  if (json == nullptr) return Tensor();
  WEFT_ASSIGN_OR_RETURN(Tensor tensor, TensorFromJson(kTargets, *json));
  if (tensor.dtype() != DTYPE_INT64) {
    return BadField(absl::StrCat(kTargets, ".dtype"), "must be int64");
  }
  const int rows = out->prompt_size() - 1;
  if (tensor.shape_size() != 2 || tensor.shape(0) != rows) {
    return BadField(absl::StrCat(kTargets, ".shape"),
                    absl::StrCat("must be [", rows,
                                 ", K], with a row for each token of "
                                 "the prompt but the first"));
  }
  WEFT_ASSIGN_OR_RETURN(const StoredCells cells, ReadCells(kTargets, tensor));
  v1::PromptTargets* const targets = out->mutable_prompt_targets();
  for (size_t row = 0; row + 1 < cells.row_offsets.size(); ++row) {
    uint32_t count = 0;
    for (int64_t i = cells.row_offsets[row]; i < cells.row_offsets[row + 1];
         ++i) {
      const int64_t token = cells.values[static_cast<size_t>(i)];
      if (token == kNoTarget) continue;
      if (!std::in_range<int32_t>(token)) {
        return BadField(
            kTargets, absl::StrCat("has ", token,
                                   ", must have ids of tokens or ", kNoTarget));
      }
      targets->add_tokens(static_cast<uint32_t>(token));
      ++count;
    }
    targets->add_counts(count);
  }
  return tensor;
}

Tensor ScoredTargets(Tensor asked, const std::vector<float>& logprobs) {
  std::string& raw = asked.has_sparse_csr()
                         ? *asked.mutable_sparse_csr()->mutable_values()
                         : *asked.mutable_dense();
  std::vector<float> out(raw.size() / sizeof(int64_t), 0);
  auto next = logprobs.begin();
  for (size_t i = 0; i < out.size() && next != logprobs.end(); ++i) {
    int64_t token = 0;
    std::memcpy(&token, raw.data() + i * sizeof(token), sizeof(token));
    if (token != kNoTarget) out[i] = *next++;
  }
  raw = RawFloats(out);
  asked.set_dtype(DTYPE_FLOAT32);
  return asked;
}

PromptAltTokens AltTokens(const std::vector<weft::TopLogprobs>& draws,
                          int64_t width) {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  for (const weft::TopLogprobs& row : draws) {
    for (const auto& [token, logprob] : row) {
      tokens.push_back(token);
      logprobs.push_back(logprob);
    }
  }
  PromptAltTokens out;
  out.mutable_tokens()->set_dtype(DTYPE_INT32);
  out.mutable_tokens()->set_dense(tokens.data(),
                                  tokens.size() * sizeof(int32_t));
  out.mutable_logprobs()->set_dtype(DTYPE_FLOAT32);
  out.mutable_logprobs()->set_dense(RawFloats(logprobs));
  const auto rows = static_cast<int64_t>(draws.size());
  for (Tensor* const tensor : {out.mutable_tokens(), out.mutable_logprobs()}) {
    tensor->add_shape(std::max<int64_t>(rows - 1, 0));
    tensor->add_shape(width);
  }
  return out;
}

}  // namespace weft::tinker
