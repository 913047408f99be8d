// Tests every refusal of the services other than TrainingService: its cause,
// its code and its message.
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/server/refusals.h"

namespace weft {
namespace {

v1::SampleRequest GoodSample() {
  v1::SampleRequest request;
  request.set_adapter_id("a");
  request.set_snapshot("best");
  for (const uint32_t token : {1, 2, 3}) request.add_prompt(token);
  return request;
}

using Ask = v1::SampleRequest;

TEST(RefusalTest, Sample) {
  const auto config = [](Ask& r) { return r.mutable_config(); };
  const auto targets = [](Ask& r, const std::vector<uint32_t>& counts,
                          const std::vector<uint32_t>& tokens) {
    v1::PromptTargets* const to = r.mutable_prompt_targets();
    to->mutable_counts()->Add(counts.begin(), counts.end());
    to->mutable_tokens()->Add(tokens.begin(), tokens.end());
  };
  ExpectRefusals<Ask>(
      GoodSample(),
      {{"bad adapter", [](Ask& r) { r.set_adapter_id(".."); },
        "adapter_id is \"..\""},
       {"snapshot of base", [](Ask& r) { r.clear_adapter_id(); },
        "adapter_id is required with a snapshot"},
       {"bad snapshot", [](Ask& r) { r.set_snapshot("x."); },
        "snapshot is \"x.\""},
       {"no prompt", [](Ask& r) { r.clear_prompt(); },
        "prompt has 0 values, must be in [1, context length 32)"},
       {"prompt = context", [](Ask& r) { r.mutable_prompt()->Resize(32, 1); },
        "prompt has 32 values"},
       {"prompt id", [](Ask& r) { r.set_prompt(1, 100); },
        "prompt[1] is 100, must be in [0, 100)"},
       {"many samples", [](Ask& r) { r.set_num_samples(9); },
        "num_samples is 9, must be in [1, 8] (the server's --max-samples)"},
       {"10^6 samples", [](Ask& r) { r.set_num_samples(1000000); },
        "num_samples is 1000000"},
       {"top_logprobs 1025", [](Ask& r) { r.set_top_logprobs(1025); },
        "top_logprobs is 1025, must be in [0, 1024]"},
       {"in flight of base",
        [](Ask& r) {
          r.clear_adapter_id();
          r.clear_snapshot();
          r.set_in_flight(true);
        },
        "in_flight needs adapter_id: the base model has no versions"},
       {"snapshot in flight", [](Ask& r) { r.set_in_flight(true); },
        "in_flight must not be set with snapshot"},
       {"recompute_cache alone", [](Ask& r) { r.set_recompute_cache(true); },
        "recompute_cache needs in_flight"},
       {"prompt_top_logprobs 1025",
        [](Ask& r) { r.set_prompt_top_logprobs(1025); },
        "prompt_top_logprobs is 1025, must be in [0, 1024]"},
       {"prompt_alternatives 65", [](Ask& r) { r.set_prompt_alternatives(65); },
        "prompt_alternatives is 65, must be in [0, 64]"},
       {"last_n alone", [](Ask& r) { r.set_prompt_logprobs_last_n(1); },
        "prompt_logprobs_last_n is 1, is only for prompt_logprobs and "
        "prompt_top_logprobs"},
       {"last_n = prompt",
        [](Ask& r) {
          r.set_prompt_logprobs(true);
          r.set_prompt_logprobs_last_n(3);
        },
        "prompt_logprobs_last_n is 3, must be in [0, 2]"},
       {"no counts", [](Ask& r) { r.mutable_prompt_targets(); },
        "prompt_targets.counts has 0 values, must have 2, one for each token "
        "of "
        "the prompt but the first"},
       {"count 1025",
        [=](Ask& r) {
          targets(r, {0, 1025}, {});
        },
        "prompt_targets.counts[1] is 1025, must be in [0, 1024]"},
       {"few targets",
        [=](Ask& r) {
          targets(r, {1, 2}, {1, 2});
        },
        "prompt_targets.tokens has 2 values, must have 3, the sum of "
        "prompt_targets.counts"},
       {"target id",
        [=](Ask& r) {
          targets(r, {0, 1}, {100});
        },
        "prompt_targets.tokens[0] is 100, must be in [0, 100)"},
       {"max_tokens > room", [=](Ask& r) { config(r)->set_max_tokens(30); },
        "config.max_tokens is 30, must be in [1, 29]"},
       {"max_tokens -1", [=](Ask& r) { config(r)->set_max_tokens(UINT32_MAX); },
        "config.max_tokens is 4294967295"},
       {"temperature -1", [=](Ask& r) { config(r)->set_temperature(-1); },
        "config.temperature is -1, must be in [1e-08, 1e+08]"},
       {"temperature 1e-30", [=](Ask& r) { config(r)->set_temperature(1e-30); },
        "config.temperature is 1e-30"},
       {"temperature 1e30", [=](Ask& r) { config(r)->set_temperature(1e30); },
        "config.temperature is 1e+30"},
       {"temperature nan", [=](Ask& r) { config(r)->set_temperature(kNan); },
        "config.temperature is nan"},
       {"top_p 0", [=](Ask& r) { config(r)->set_top_p(0); },
        "config.top_p is 0, must be in (0, 1]"},
       {"top_p 1.1", [=](Ask& r) { config(r)->set_top_p(1.1); },
        "config.top_p is 1.1"},
       {"top_p nan", [=](Ask& r) { config(r)->set_top_p(kNan); },
        "config.top_p is nan"}});
}

TEST(RefusalTest, ChangesOfLogits) {
  const auto config = [](Ask& r) { return r.mutable_config(); };
  const auto bias = [](Ask& r, uint32_t token, float value) {
    v1::TokenBias* const entry = r.mutable_config()->add_logit_bias();
    entry->set_token(token);
    entry->set_bias(value);
  };
  ExpectRefusals<Ask>(
      GoodSample(),
      {{"min_p -1", [=](Ask& r) { config(r)->set_min_p(-1); },
        "config.min_p is -1, must be in [0, 1]"},
       {"min_p nan", [=](Ask& r) { config(r)->set_min_p(kNan); },
        "config.min_p is nan"},
       {"repetition 0", [=](Ask& r) { config(r)->set_repetition_penalty(0); },
        "config.repetition_penalty is 0, must be in [0.01, 100]"},
       {"repetition inf",
        [=](Ask& r) { config(r)->set_repetition_penalty(kInf); },
        "config.repetition_penalty is inf"},
       {"presence 3", [=](Ask& r) { config(r)->set_presence_penalty(3); },
        "config.presence_penalty is 3, must be in [-2, 2]"},
       {"frequency -3", [=](Ask& r) { config(r)->set_frequency_penalty(-3); },
        "config.frequency_penalty is -3, must be in [-2, 2]"},
       {"bias of token 100", [=](Ask& r) { bias(r, 100, 1); },
        "config.logit_bias[0].token is 100, must be in [0, 100)"},
       {"bias of token -1", [=](Ask& r) { bias(r, UINT32_MAX, 1); },
        "config.logit_bias[0].token is 4294967295"},
       {"bias 101", [=](Ask& r) { bias(r, 5, 101); },
        "config.logit_bias[0].bias is 101, must be in [-100, 100]"},
       {"bias nan", [=](Ask& r) { bias(r, 5, std::nanf("")); },
        "config.logit_bias[0].bias is nan"},
       {"bias again",
        [=](Ask& r) {
          bias(r, 5, 1);
          bias(r, 5, 2);
        },
        "config.logit_bias[1].token is 5 again"},
       {"1025 biases",
        [=](Ask& r) {
          for (uint32_t i = 0; i < 1025; ++i) bias(r, i, 1);
        },
        "config.logit_bias has 1025 entries, must be at most 1024"},
       {"allowed token", [=](Ask& r) { config(r)->add_allowed_token_ids(100); },
        "config.allowed_token_ids[0] is 100, must be in [0, 100)"},
       {"101 allowed",
        [=](Ask& r) {
          for (int i = 0; i < 101; ++i) config(r)->add_allowed_token_ids(1);
        },
        "config.allowed_token_ids has 101 values, must be at most 100"},
       {"min_tokens > max_tokens",
        [=](Ask& r) {
          config(r)->set_max_tokens(3);
          config(r)->set_min_tokens(4);
        },
        "config.min_tokens is 4, must be in [0, 3]"},
       {"only a stop",
        [=](Ask& r) {
          config(r)->set_min_tokens(1);
          config(r)->add_allowed_token_ids(8);
          config(r)->mutable_stop()->add_token_ids(8);
        },
        "config.min_tokens is 1, must be 0: all tokens that may be drawn "
        "end"}});
}

TEST(RefusalTest, StopRules) {
  const auto stop = [](Ask& r) { return r.mutable_config()->mutable_stop(); };
  ExpectRefusals<Ask>(
      GoodSample(),
      {{"10^4 entries",
        [=](Ask& r) { stop(r)->mutable_token_ids()->Resize(10000, 1); },
        "config.stop has 10000 entries, must be at most 64"},
       {"65 entries of all kinds",
        [=](Ask& r) {
          stop(r)->mutable_token_ids()->Resize(64, 1);
          stop(r)->add_byte_strings("x");
        },
        "config.stop has 65 entries"},
       {"id", [=](Ask& r) { stop(r)->add_token_ids(100); },
        "config.stop.token_ids[0] is 100"},
       {"empty sequence", [=](Ask& r) { stop(r)->add_token_sequences(); },
        "config.stop.token_sequences[0].tokens has 0 values, must be in [1"},
       {"long sequence",
        [=](Ask& r) {
          stop(r)->add_token_sequences()->mutable_tokens()->Resize(65, 1);
        },
        "config.stop.token_sequences[0].tokens has 65 values"},
       {"sequence id",
        [=](Ask& r) { stop(r)->add_token_sequences()->add_tokens(100); },
        "config.stop.token_sequences[0].tokens[0] is 100"},
       {"empty string", [=](Ask& r) { stop(r)->add_byte_strings(""); },
        "config.stop.byte_strings[0] has 0 bytes, must be in [1, 256]"},
       {"long string",
        [=](Ask& r) { stop(r)->add_byte_strings(std::string(257, 'x')); },
        "config.stop.byte_strings[0] has 257 bytes"},
       {"no tokenizer", [=](Ask& r) { stop(r)->add_byte_strings("x"); },
        "config.stop.byte_strings needs a tokenizer.json",
        absl::StatusCode::kFailedPrecondition}});
}

TEST(RefusalTest, CreateAdapter) {
  using Create = v1::CreateAdapterRequest;
  Create good;
  good.set_adapter_id("a");
  const auto config = [](Create& r) { return r.mutable_config(); };
  ExpectRefusals<Create>(
      good,
      {{"tenant", [](Create& r) { r.set_tenant("../b"); },
        "tenant is \"../b\""},
       {"rank 65", [=](Create& r) { config(r)->set_rank(65); },
        "config.rank is 65, must be in [1, 64] (the server's --max-rank)"},
       {"rank -1", [=](Create& r) { config(r)->set_rank(UINT32_MAX); },
        "config.rank is 4294967295"},
       {"alpha 0", [=](Create& r) { config(r)->set_alpha(0); },
        "config.alpha is 0, must be in (0, 1e+06]"},
       {"alpha < 0", [=](Create& r) { config(r)->set_alpha(-1); },
        "config.alpha is -1"},
       {"alpha nan", [=](Create& r) { config(r)->set_alpha(kNan); },
        "config.alpha is nan"},
       {"alpha inf", [=](Create& r) { config(r)->set_alpha(kInf); },
        "config.alpha is inf"},
       {"unspecified target",
        [=](Create& r) {
          config(r)->add_target_modules(v1::TARGET_MODULE_UNSPECIFIED);
        },
        "config.target_modules[0] is 0, must be a known TargetModule"},
       {"unknown target",
        [=](Create& r) {
          config(r)->add_target_modules(static_cast<v1::TargetModule>(77));
        },
        "config.target_modules[0] is 77"},
       {"target of other models",
        [=](Create& r) {
          config(r)->add_target_modules(v1::TARGET_MODULE_IN_PROJ_QKV);
        },
        "config.target_modules[0] is in_proj_qkv, which the base model does "
        "not have, must be one of q_proj, k_proj, v_proj, o_proj, gate_proj, "
        "up_proj, down_proj, lm_head, embed_tokens"},
       {"target twice",
        [=](Create& r) {
          config(r)->add_target_modules(v1::TARGET_MODULE_Q_PROJ);
          config(r)->add_target_modules(v1::TARGET_MODULE_Q_PROJ);
        },
        "config.target_modules[1] is q_proj again"}});
}

// These names have broken other servers.
TEST(RefusalTest, BadNames) {
  const std::vector<std::string> names = {"",
                                          "..",
                                          ".",
                                          "../etc",
                                          "a/../b",
                                          " ..",
                                          ".. ",
                                          "/etc/passwd",
                                          "a/b",
                                          "a\\b",
                                          std::string("a\0b", 3),
                                          "a\tb",
                                          "a\nb",
                                          "a b",
                                          std::string(129, 'x'),
                                          "-rf",
                                          "_x",
                                          "\xF0\x9F\x98\x80",
                                          "\xE2\x80\xAEx",
                                          "%2e%2e",
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

TEST(RefusalTest, NamesOfEveryOtherMessage) {
  v1::SaveCheckpointRequest save;
  save.set_adapter_id("a");
  save.set_name("n");
  ExpectRefusals<v1::SaveCheckpointRequest>(
      save,
      {{"adapter", [](auto& r) { r.set_adapter_id("/"); }, "adapter_id"},
       {"name", [](auto& r) { r.set_name("../x"); }, "name is"},
       {"kind", [](auto& r) { r.set_kind(static_cast<v1::CheckpointKind>(7)); },
        "kind is 7, must be a known CheckpointKind"},
       {"key", [](auto& r) { (*r.mutable_metadata())["a/b"] = ""; },
        "metadata key is \"a/b\""},
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
       {"ttl", [](auto& r) { r.set_ttl_seconds(315360001); },
        "ttl_seconds is 315360001, must be in [0, 315360000]"},
       {"keep", [](auto& r) { r.set_keep_newest(1000001); },
        "keep_newest is 1000001, must be in [0, 1000000]"}});
  v1::LoadCheckpointRequest load;
  load.set_adapter_id("a");
  load.set_name("n");
  ExpectRefusals<v1::LoadCheckpointRequest>(
      load,
      {{"adapter", [](auto& r) { r.clear_adapter_id(); }, "adapter_id is"},
       {"source", [](auto& r) { r.set_source_adapter_id("../b"); },
        "source_adapter_id is \"../b\""},
       {"tenant", [](auto& r) { r.set_tenant("b."); }, "tenant is \"b.\""},
       {"name", [](auto& r) { r.clear_name(); }, "name is required"}});
  v1::DeleteCheckpointRequest erase;
  erase.set_adapter_id("a");
  erase.set_name("n");
  ExpectRefusals<v1::DeleteCheckpointRequest>(
      erase, {{"adapter", [](auto& r) { r.set_adapter_id(" "); }, "adapter_id"},
              {"name", [](auto& r) { r.set_name("."); }, "name is \".\""}});
  v1::DownloadCheckpointRequest download;
  download.set_adapter_id("a");
  download.set_name("n");
  ExpectRefusals<v1::DownloadCheckpointRequest>(
      download,
      {{"adapter", [](auto& r) { r.clear_adapter_id(); }, "adapter_id is"},
       {"name", [](auto& r) { r.set_name("../n"); }, "name is \"../n\""}});
  v1::PublishSnapshotRequest publish;
  publish.set_adapter_id("a");
  publish.set_name("n");
  ExpectRefusals<v1::PublishSnapshotRequest>(
      publish,
      {{"adapter", [](auto& r) { r.clear_adapter_id(); }, "adapter_id is"},
       {"name", [](auto& r) { r.clear_name(); }, "name is required"}});
  v1::ReleaseSnapshotRequest release;
  release.set_adapter_id("a");
  release.set_name("n");
  ExpectRefusals<v1::ReleaseSnapshotRequest>(
      release,
      {{"adapter", [](auto& r) { r.clear_adapter_id(); }, "adapter_id is"},
       {"name", [](auto& r) { r.set_name("a/b"); }, "name is \"a/b\""}});
  v1::ExportAdapterRequest exported;
  exported.set_adapter_id("a");
  ExpectRefusals<v1::ExportAdapterRequest>(
      exported,
      {{"adapter", [](auto& r) { r.clear_adapter_id(); }, "adapter_id is"},
       {"snapshot", [](auto& r) { r.set_snapshot("a/b"); }, "snapshot is"}});
  v1::DeleteAdapterRequest remove;
  remove.set_adapter_id("a");
  ExpectRefusals<v1::DeleteAdapterRequest>(
      remove, {{"adapter", [](auto& r) { r.set_adapter_id(".."); },
                "adapter_id is \"..\""}});
  ExpectRefusals<v1::ListCheckpointsRequest>(
      {}, {{"adapter", [](auto& r) { r.set_adapter_id("a/b"); },
            "adapter_id is \"a/b\""}});
  ExpectRefusals<v1::ListAdaptersRequest>(
      {}, {{"page size", [](auto& r) { r.set_page_size(1001); },
            "page_size is 1001, must be in [1, 1000]"},
           {"page token", [](auto& r) { r.set_page_token("../x"); },
            "page_token is \"../x\""}});
}

}  // namespace
}  // namespace weft
