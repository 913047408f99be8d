// Tests PEFT folders of models that have q, k and v, or gate and up, as one
// module, or whose heads have another order in files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "src/lora/expert_rank.h"
#include "src/lora/peft_format.h"
#include "src/weights/safetensors.h"
#include "tests/support/status_matchers.h"

namespace weft::lora::peft_fused_test {
namespace {

using Json = nlohmann::json;
using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;
using weights::NamedTensor;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr char kQkv[] = "base_model.model.model.layers.0.self_attn.qkv_proj.";

model_config::ModelShape Fused() {
  return {.num_layers = 1,
          .hidden = 3,
          .q_width = 4,
          .kv_width = 2,
          .ffn = 5,
          .vocab = 7,
          .fused_qkv = true,
          .fused_gate_up = true};
}

LoraConfig Qkv(int rank, double alpha) {
  return {.rank = rank,
          .alpha = alpha,
          .target_modules = {TargetModule::kQProj, TargetModule::kKProj,
                             TargetModule::kVProj}};
}

std::vector<float> Counting(const model_config::ModelShape& shape,
                            const LoraConfig& config) {
  std::vector<float> values(AdapterLayout(shape, config).num_parameters());
  std::iota(values.begin(), values.end(), 1.0F);
  return values;
}

// Returns the values of a tensor in files of WritePeft.
std::vector<float> Values(const PeftFiles& files, const std::string& name) {
  const auto tensors = weights::ParseSafetensors(files[1].second);
  const auto found = tensors->find(name);
  if (found == tensors->end()) return {};
  const auto* data = reinterpret_cast<const float*>(found->second.bytes.data());
  return {data, data + found->second.num_elements()};
}

TEST(FusedModules, AnExportHasABlockForEachPart) {
  const LoraConfig config = Qkv(1, 2);
  const std::vector<float> values = Counting(Fused(), config);
  const PeftFiles files = WritePeft(config, Fused(), values, "base");
  const Json json = Json::parse(files[0].second);
  EXPECT_EQ(json["target_modules"], Json({"qkv_proj"}));
  const Json key = "model.layers.0.self_attn.qkv_proj";
  EXPECT_EQ(json["rank_pattern"], Json({{key, 3}}));
  EXPECT_EQ(json["alpha_pattern"], Json({{key, 6}}));
  // A has the rows of q, k and v. B's rows of k use the second column alone.
  EXPECT_THAT(Values(files, absl::StrCat(kQkv, "lora_A.weight")),
              ElementsAre(1, 2, 3, 4, 5, 6, 7, 8, 9));
  EXPECT_THAT(Values(files, absl::StrCat(kQkv, "lora_B.weight")),
              ElementsAre(10, 0, 0, 11, 0, 0, 12, 0, 0, 13, 0, 0,  // q
                          0, 14, 0, 0, 15, 0,                      // k
                          0, 0, 16, 0, 0, 17));                    // v
  const auto again = ReadPeft(files, Fused()).value();
  EXPECT_EQ(again.weights, values);
  EXPECT_EQ(AdapterLayout(Fused(), again.config).factors(),
            AdapterLayout(Fused(), config).factors());
}

TEST(FusedModules, EveryModuleComesBack) {
  const LoraConfig config = {.rank = 2, .alpha = 3};
  const std::vector<float> values = Counting(Fused(), config);
  const PeftFiles files = WritePeft(config, Fused(), values, "base");
  EXPECT_THAT(
      Json::parse(files[0].second)["target_modules"],
      UnorderedElementsAre("qkv_proj", "o_proj", "gate_up_proj", "down_proj"));
  const auto again = ReadPeft(files, Fused()).value();
  EXPECT_EQ(again.weights, values);
}

// Returns the files of an adapter of qkv_proj as PEFT trains it.
PeftFiles Shared(const std::vector<float>& a, const std::vector<float>& b,
                 int rank) {
  const auto view = [](const std::vector<float>& values, int64_t columns) {
    return weights::TensorView{
        .dtype = weights::ScalarType::kF32,
        .shape = {static_cast<int64_t>(values.size()) / columns, columns},
        .bytes = absl::MakeConstSpan(
            reinterpret_cast<const std::byte*>(values.data()),
            values.size() * sizeof(float))};
  };
  const Json json = {{"peft_type", "LORA"},
                     {"r", rank},
                     {"lora_alpha", 6},
                     {"target_modules", {"qkv_proj"}}};
  return {
      {"adapter_config.json", json.dump()},
      {"adapter_model.safetensors",
       weights::WriteSafetensors(
           {NamedTensor{absl::StrCat(kQkv, "lora_A.weight"), view(a, 3)},
            NamedTensor{absl::StrCat(kQkv, "lora_B.weight"), view(b, rank)}})}};
}

TEST(FusedModules, PartsOfAPeftAdapterShareItsA) {
  const std::vector<float> b = {1, 2, 3, 4, 5, 6, 7, 8};
  const auto adapter = ReadPeft(Shared({7, 8, 9}, b, 1), Fused()).value();
  EXPECT_EQ(adapter.config, Qkv(1, 6));
  EXPECT_THAT(adapter.weights, ElementsAre(7, 8, 9, 7, 8, 9, 7, 8, 9,  //
                                           1, 2, 3, 4, 5, 6, 7, 8));
  // Rank 3, but the rows of q use every column.
  const auto dense =
      ReadPeft(Shared(std::vector<float>(9, 1), std::vector<float>(24, 1), 3),
               Fused())
          .value();
  EXPECT_EQ(dense.config.rank, 3);
  EXPECT_EQ(dense.weights.size(), 3 * 9 + 24);
  EXPECT_THAT(ReadPeft(Shared({7, 8, 9}, {1, 2, 3}, 1), Fused()),
              IsStatus(kInvalid, "expected [8, 1]"));
}

TEST(FusedModules, AnErrorListsTheNamesInFiles) {
  PeftFiles files = Shared({7, 8, 9}, {1, 2, 3, 4, 5, 6, 7, 8}, 1);
  Json json = Json::parse(files[0].second);
  json["target_modules"] = {"q_proj"};
  files[0].second = json.dump();
  EXPECT_THAT(ReadPeft(files, Fused()),
              IsStatus(kInvalid,
                       "what names a module to adapt: qkv_proj, o_proj, "
                       "gate_up_proj, down_proj, lm_head"));
}

TEST(FusedModules, PartsAreTargetedTogether) {
  LoraConfig config = Qkv(4, 8);
  EXPECT_THAT(WithExpertRank(config, Fused()), IsOk());
  config.target_modules.pop_back();
  EXPECT_THAT(
      WithExpertRank(config, Fused()),
      IsStatus(kInvalid, "some of q_proj, k_proj and v_proj; the base model"));
  config.target_modules = {TargetModule::kUpProj};
  EXPECT_THAT(WithExpertRank(config, Fused()),
              IsStatus(kInvalid, "some of gate_proj and up_proj"));
}

TEST(HeadOrder, RowsOfBFollowTheOrderInFiles) {
  // Not its own inverse.
  const std::vector<int> order = {0, 2, 4, 1, 3, 5};
  model_config::ModelShape shape = Fused();
  shape.fused_qkv = false;
  shape.q_width = shape.kv_width = 6;
  shape.head_order = order;
  const LoraConfig config = Qkv(1, 1);
  const std::vector<float> values = Counting(shape, config);  // A: 1 to 9.
  const PeftFiles files = WritePeft(config, shape, values, "base");
  const auto b = [&](const char* module) {
    return Values(files,
                  absl::StrCat("base_model.model.model.layers.0.self_attn.",
                               module, ".lora_B.weight"));
  };
  EXPECT_THAT(b("q_proj"), ElementsAre(10, 13, 11, 14, 12, 15));
  EXPECT_THAT(b("k_proj"), ElementsAre(16, 19, 17, 20, 18, 21));
  EXPECT_THAT(b("v_proj"), ElementsAre(22, 23, 24, 25, 26, 27));
  const auto again = ReadPeft(files, shape).value();
  EXPECT_EQ(again.weights, values);
  const std::string buffers = WriteBuffers(
      config, shape, std::vector<NamedBuffer>{{"exp_avg", values}});
  EXPECT_EQ(*ReadBuffer(buffers, "exp_avg", config, shape), values);
}

}  // namespace
}  // namespace weft::lora::peft_fused_test
