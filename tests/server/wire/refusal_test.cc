// Tests every refusal of the services other than TrainingService: its cause,
// its code and its message.
#include <string>
#include <vector>

#include "tests/server/wire/refusals.h"
#include "tests/support/status_matchers.h"

namespace weft::server {
namespace {

v1::SampleRequest GoodSample() {
  return Edited(v1::SampleRequest(),
                "adapter_id = 'a'; snapshot = 'best'; prompt = [1, 2, 3]");
}

using Ask = v1::SampleRequest;

TEST(RefusalTest, Sample) {
  ExpectRefusals<Ask>(
      GoodSample(),
      {{"adapter_id = '..'", "adapter_id is \"..\""},
       {"clear adapter_id", "adapter_id is required with a snapshot"},
       {"snapshot = 'x.'", "snapshot is \"x.\""},
       {"clear prompt",
        "prompt has 0 values, must be in [1, context length 32)"},
       {"prompt = 1 * 32", "prompt has 32 values"},
       {"prompt[1] = 100", "prompt[1] is 100, must be in [0, 100)"},
       {"num_samples = 9",
        "num_samples is 9, must be in [1, 8] (the server's --max-samples)"},
       {"top_logprobs = 1025", "top_logprobs is 1025, must be in [0, 1024]"},
       {"clear adapter_id; clear snapshot; in_flight = true",
        "in_flight needs adapter_id: the base model has no versions"},
       {"in_flight = true", "in_flight must not be set with snapshot"},
       {"recompute_cache = true", "recompute_cache needs in_flight"},
       {"checkpoint = 'c'",
        "snapshot must not be set with checkpoint: leave one of them out"},
       {"clear adapter_id; clear snapshot; checkpoint = 'c'",
        "adapter_id is required with a checkpoint"},
       {"clear snapshot; checkpoint = 'a/b'", "checkpoint is \"a/b\""},
       {"clear snapshot; checkpoint = 'c'; in_flight = true",
        "in_flight must not be set with checkpoint"},
       {"clear snapshot; checkpoint = 'c'; recompute_cache = true",
        "recompute_cache must not be set with checkpoint"},
       {"prompt_top_logprobs = 1025",
        "prompt_top_logprobs is 1025, must be in [0, 1024]"},
       {"prompt_alternatives = 65",
        "prompt_alternatives is 65, must be in [0, 64]"},
       {"prompt_logprobs_last_n = 1",
        "prompt_logprobs_last_n is 1, is only for prompt_logprobs and "
        "prompt_top_logprobs"},
       {"prompt_logprobs = true; prompt_logprobs_last_n = 3",
        "prompt_logprobs_last_n is 3, must be in [0, 2]"},
       {"prompt_targets = {}",
        "prompt_targets.counts has 0 values, must have 2, one for each token "
        "of the prompt but the first"},
       {"prompt_targets = {counts: [0, 1025]}",
        "prompt_targets.counts[1] is 1025, must be in [0, 1024]"},
       {"prompt_targets = {counts: [1, 2] tokens: [1, 2]}",
        "prompt_targets.tokens has 2 values, must have 3, the sum of "
        "prompt_targets.counts"},
       {"prompt_targets = {counts: [0, 1] tokens: 100}",
        "prompt_targets.tokens[0] is 100, must be in [0, 100)"},
       {"config.max_tokens = 30",
        "config.max_tokens is 30, must be in [1, 29]"},
       {"config.max_tokens = 4294967294", "config.max_tokens is 4294967294"},
       {"config.temperature = -1",
        "config.temperature is -1, must be in [1e-08, 1e+08] or 0 for the "
        "likeliest token"},
       {"config.top_p = 0", "config.top_p is 0, must be in (0, 1]"}});
}

TEST(RefusalTest, ChangesOfLogits) {
  ExpectRefusals<Ask>(
      GoodSample(),
      {{"config.min_p = -1", "config.min_p is -1, must be in [0, 1]"},
       {"config.repetition_penalty = 0",
        "config.repetition_penalty is 0, must be in [0.01, 100]"},
       {"config.presence_penalty = 3",
        "config.presence_penalty is 3, must be in [-2, 2]"},
       {"config.frequency_penalty = -3",
        "config.frequency_penalty is -3, must be in [-2, 2]"},
       {"config.logit_bias += {token: 100}",
        "config.logit_bias[0].token is 100, must be in [0, 100)"},
       {"config.logit_bias += {token: 4294967295}",
        "config.logit_bias[0].token is 4294967295"},
       {"config.logit_bias += {token: 5 bias: 101}",
        "config.logit_bias[0].bias is 101, must be in [-100, 100]"},
       {"config.logit_bias += {token: 5}; config.logit_bias += {token: 5}",
        "config.logit_bias[1].token is 5 again"},
       {"config.logit_bias += {} * 1025",
        "config.logit_bias has 1025 entries, must be at most 1024"},
       {"config.allowed_token_ids += 100",
        "config.allowed_token_ids[0] is 100, must be in [0, 100)"},
       {"config.allowed_token_ids = 1 * 101",
        "config.allowed_token_ids has 101 values, must be at most 100"},
       {"config.max_tokens = 3; config.min_tokens = 4",
        "config.min_tokens is 4, must be in [0, 3]"},
       {"config.min_tokens = 1; config.allowed_token_ids += 8; "
        "config.stop.token_ids += 8",
        "config.min_tokens is 1, must be 0: all tokens that may be drawn "
        "end"}});
}

TEST(RefusalTest, StopRules) {
  ExpectRefusals<Ask>(
      GoodSample(),
      {{"config.stop.token_ids = 1 * 10000",
        "config.stop has 10000 entries, must be at most 64"},
       {"config.stop.token_ids = 1 * 64; config.stop.byte_strings += 'x'",
        "config.stop has 65 entries"},
       {"config.stop.token_ids += 100", "config.stop.token_ids[0] is 100"},
       {"config.stop.token_sequences += {}",
        "config.stop.token_sequences[0].tokens has 0 values, must be in [1"},
       {"config.stop.token_sequences += {}; "
        "config.stop.token_sequences[0].tokens = 1 * 65",
        "config.stop.token_sequences[0].tokens has 65 values"},
       {"config.stop.token_sequences += {tokens: 100}",
        "config.stop.token_sequences[0].tokens[0] is 100"},
       {"config.stop.byte_strings += ''",
        "config.stop.byte_strings[0] has 0 bytes, must be in [1, 256]"},
       {"long string",
        [](Ask& r) {
          r.mutable_config()->mutable_stop()->add_byte_strings(
              std::string(257, 'x'));
        },
        "config.stop.byte_strings[0] has 257 bytes"},
       {"config.stop.byte_strings += 'x'",
        "config.stop.byte_strings needs a tokenizer.json",
        absl::StatusCode::kFailedPrecondition}});
}

TEST(RefusalTest, CreateAdapter) {
  using Create = v1::CreateAdapterRequest;
  ExpectRefusals<Create>(
      Edited(Create(), "adapter_id = 'a'"),
      {{"tenant = '../b'", "tenant is \"../b\""},
       {"config.rank = 65",
        "config.rank is 65, must be in [1, 64] (the server's --max-rank)"},
       {"config.alpha = 0", "config.alpha is 0, must be in (0, 1e+06]"},
       {"config.target_modules += TARGET_MODULE_UNSPECIFIED",
        "config.target_modules[0] is 0, must be a known TargetModule"},
       {"config.target_modules += 77", "config.target_modules[0] is 77"},
       {"config.target_modules += TARGET_MODULE_IN_PROJ_QKV",
        "config.target_modules[0] is in_proj_qkv, which the base model does "
        "not have, must be one of q_proj, k_proj, v_proj, o_proj, gate_proj, "
        "up_proj, down_proj, lm_head, embed_tokens"},
       {"config.target_modules = TARGET_MODULE_Q_PROJ * 2",
        "config.target_modules[1] is q_proj again"}});
}

// These names have broken other servers.
TEST(RefusalTest, BadNames) {
  const std::vector<std::string> names = {"",
                                          "..",
                                          "a/b",
                                          " ..",
                                          "/etc/passwd",
                                          "a\\b",
                                          std::string("a\0b", 3),
                                          "a\tb",
                                          std::string(129, 'x'),
                                          "-rf",
                                          "_x",
                                          "\xE2\x80\xAEx",
                                          "a.",
                                          "a:b",
                                          "caf\xC3\xA9"};
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    v1::GetAdapterRequest request;
    request.set_adapter_id(name);
    const absl::Status status = Validate(request, Limits()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    // Messages escape control characters and bytes that are not ASCII.
    for (const char c : status.message()) {
      EXPECT_GE(c, ' ');
      EXPECT_LE(c, '~');
    }
  }
  for (const std::string& name :
       {std::string("a"), std::string("CON"), std::string("0"),
        std::string("a.b-c_D"), std::string(128, 'x')}) {
    v1::GetAdapterRequest request;
    request.set_adapter_id(name);
    EXPECT_TRUE(Validate(request, Limits()).ok()) << name;
  }
}

// Expects that requests of an adapter and a second thing check both names.
template <typename... Messages>
void ExpectChecksOfBothNames() {
  (ExpectRefusals<Messages>(
       Edited(Messages(), "adapter_id = 'a'; name = 'n'"),
       {{"clear adapter_id", "adapter_id is required"},
        {"adapter_id = ' '", "adapter_id is \" \", must match"},
        {"clear name", "name is required"},
        {"name = '../n'", "name is \"../n\", must match"}}),
   ...);
}

TEST(RefusalTest, NamesOfEveryOtherMessage) {
  ExpectChecksOfBothNames<
      v1::SaveCheckpointRequest, v1::LoadCheckpointRequest,
      v1::DeleteCheckpointRequest, v1::SetCheckpointTtlRequest,
      v1::DownloadCheckpointRequest, v1::PublishSnapshotRequest,
      v1::ReleaseSnapshotRequest>();
  ExpectRefusals<v1::SaveCheckpointRequest>(
      Edited(v1::SaveCheckpointRequest(), "adapter_id = 'a'; name = 'n'"),
      {{"kind = 7", "kind is 7, must be a known CheckpointKind"},
       {"metadata += {key: 'a/b'}", "metadata key is \"a/b\""},
       {"value",
        [](auto& r) { (*r.mutable_metadata())["k"] = std::string(16384, 'x'); },
        "metadata has 16385 bytes, must be at most 16384"},
       {"entries",
        [](auto& r) {
          for (int i = 0; i < 65; ++i) {
            (*r.mutable_metadata())[std::to_string(i)] = "";
          }
        },
        "metadata has 65 entries, must be at most 64"},
       {"ttl_seconds = 315360001",
        "ttl_seconds is 315360001, must be in [0, 315360000]"},
       {"keep_newest = 1000001",
        "keep_newest is 1000001, must be in [0, 1000000]"}});
  ExpectRefusals<v1::SetCheckpointTtlRequest>(
      Edited(v1::SetCheckpointTtlRequest(), "adapter_id = 'a'; name = 'n'"),
      {{"ttl_seconds = 315360001",
        "ttl_seconds is 315360001, must be in [0, 315360000]"}});
  ExpectRefusals<v1::LoadCheckpointRequest>(
      Edited(v1::LoadCheckpointRequest(), "adapter_id = 'a'; name = 'n'"),
      {{"source_adapter_id = '../b'", "source_adapter_id is \"../b\""},
       {"tenant = 'b.'", "tenant is \"b.\""}});
  ExpectRefusals<v1::ExportAdapterRequest>(
      Edited(v1::ExportAdapterRequest(), "adapter_id = 'a'"),
      {{"clear adapter_id", "adapter_id is"},
       {"snapshot = 'a/b'", "snapshot is"}});
  ExpectRefusals<v1::DeleteAdapterRequest>(
      Edited(v1::DeleteAdapterRequest(), "adapter_id = 'a'"),
      {{"adapter_id = '..'", "adapter_id is \"..\""}});
  ExpectRefusals<v1::MoveAdapterRequest>(
      Edited(v1::MoveAdapterRequest(), "adapter_id = 'a'; log = 1"),
      {{"clear adapter_id", "adapter_id is required"},
       {"adapter_id = '..'", "adapter_id is \"..\""},
       {"log = 4294967295", "log is 4294967295, must be in [0, 2147483647]"}});
  ExpectRefusals<v1::ListCheckpointsRequest>(
      {}, {{"adapter_id = 'a/b'", "adapter_id is \"a/b\""}});
  ExpectRefusals<v1::ListAdaptersRequest>(
      {}, {{"page_size = 1001", "page_size is 1001, must be in [1, 1000]"},
           {"page_token = '../x'", "page_token is \"../x\""}});
}

}  // namespace
}  // namespace weft::server
