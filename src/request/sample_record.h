// The record of a sample: what training on the sample needs later. It names
// each sequence by an id, and a training request names parts of sequences by
// spans (SampledSpan).
#ifndef WEFT_SRC_REQUEST_SAMPLE_RECORD_H_
#define WEFT_SRC_REQUEST_SAMPLE_RECORD_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "src/request/adapter_key.h"
#include "src/request/sample.h"
#include "src/request/train.h"

namespace weft {

// S drawn tokens. Logprobs and supports are those of the distribution from
// which the tokens were drawn.
struct SequenceRecord {
  std::vector<int32_t> tokens;        // [S]
  std::vector<float> logprobs;        // [S]
  std::vector<VersionSpan> versions;  // Their tokens are S in all.
  TokenSupport support;
  // The experts [S - 1, L, K] of all tokens but the last, for L layers with
  // experts and K experts per token. Empty for a model without experts.
  std::vector<uint16_t> routing;

  friend bool operator==(const SequenceRecord&,
                         const SequenceRecord&) = default;
};

// All sequences of one Sample request. They share the P tokens of the prompt.
struct SampleRecord {
  std::string tenant;  // Only requests of this tenant find the record.
  std::string id;
  AdapterKey adapter = AdapterKey::kBaseModel;
  // The logprobs are of this temperature: 1 if the sample's was 0.
  double temperature = 1;
  // Penalties or biases changed the logits.
  bool edited = false;
  uint64_t num_prompt = 0;               // P.
  std::string prompt_digest;             // The SHA-256 of the prompt's tokens.
  std::vector<uint16_t> prompt_routing;  // [P, L, K], or empty.
  std::vector<SequenceRecord> sequences;

  friend bool operator==(const SampleRecord&, const SampleRecord&) = default;
};

// Returns the id of a record's sequence, and the record's id and the index of
// the sequence that has this id; none if no sequence can have it.
std::string SequenceId(absl::string_view record, size_t index);
std::optional<std::pair<std::string, size_t>> ParseSequenceId(
    absl::string_view sequence_id);

// Returns the record of a finished request. REQUIRES: request.record is not
// empty.
SampleRecord RecordOf(const SampleRequest& request, AdapterKey adapter,
                      const SampleResult& result);

// Returns a tenant's record by its id; null if it is gone.
using FindRecord = std::function<std::shared_ptr<const SampleRecord>(
    const std::string& tenant, const std::string& id)>;

// Takes from records what request->replay asks for: experts, supports and
// logprobs of the targets in spans. Clears request->replay and fills
// request->replayed. `adapter` is the request's. Finds each record once, and
// frees it before it finds the next.
//
// Row i of a datum is the token that predicts targets[i], so the experts of a
// span's rows are those with which its tokens were drawn. A record also gives
// the experts of the rows before its span if they are the record's prompt and
// earlier tokens: rows that no span gives are taken from the nearest later one.
// The router chooses the experts of all other rows.
//
// Errors, which name the datum and the span: INVALID_ARGUMENT if the targets
// are not the tokens that were drawn, or a scored target has no logprob;
// unless replay.optional, INVALID_ARGUMENT if the loss has another distribution
// than the draws (another temperature, changes of logits, or no support), and
// FAILED_PRECONDITION if a record is gone.
absl::Status ReplaySamples(const FindRecord& find, AdapterKey adapter,
                           TrainRequest* request);

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_SAMPLE_RECORD_H_
