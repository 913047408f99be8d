#include "src/lora/peft_format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "src/lora/peft_config.h"
#include "src/weights/float_convert.h"
#include "src/weights/safetensors.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace weft::lora::peft_format_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using weights::NamedTensor;
using weights::ScalarType;
using weights::TensorView;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr model_config::ModelShape kShape = {.num_layers = 2,
                                             .hidden = 4,
                                             .q_width = 6,
                                             .kv_width = 2,
                                             .ffn = 8,
                                             .vocab = 10};

LoraConfig HeadAndDown() {
  return {.rank = 2,
          .alpha = 4,
          .target_modules = {TargetModule::kDownProj, TargetModule::kLmHead}};
}

std::vector<float> Counting(const LoraConfig& config) {
  std::vector<float> values(AdapterLayout(kShape, config).num_parameters());
  std::iota(values.begin(), values.end(), 1.0f);
  return values;
}

template <typename T>
absl::Span<const std::byte> BytesOf(const std::vector<T>& values) {
  return absl::MakeConstSpan(reinterpret_cast<const std::byte*>(values.data()),
                             values.size() * sizeof(T));
}

PeftFiles Written() {
  return WritePeft(HeadAndDown(), kShape, Counting(HeadAndDown()), "base");
}

// Returns the files of an adapter after `edit` has changed its tensors.
template <typename Edit>
PeftFiles Edited(Edit edit, PeftFiles files = Written()) {
  const auto parsed = weights::ParseSafetensors(files[1].second);
  std::vector<NamedTensor> tensors;
  for (const auto& [name, view] : *parsed) tensors.push_back({name, view});
  edit(tensors);
  files[1].second = weights::WriteSafetensors(tensors);
  return files;
}

TEST(PeftFormat, ComesBackAsItWas) {
  for (const LoraConfig& config :
       {HeadAndDown(), LoraConfig{.rank = 3, .alpha = 0.5}}) {
    const std::vector<float> values = Counting(config);
    const PeftFiles files = WritePeft(config, kShape, values, "base");
    EXPECT_EQ(files, WritePeft(config, kShape, values, "base"));
    const auto adapter = ReadPeft(files, kShape).value();
    EXPECT_EQ(adapter.config, config);
    EXPECT_EQ(adapter.weights, values);
  }
}

TEST(PeftFormat, NamesAndShapesAreThoseOfPeft) {
  const PeftFiles files = Written();
  EXPECT_EQ(files[0].first, "adapter_config.json");
  EXPECT_EQ(files[1].first, "adapter_model.safetensors");
  const auto tensors = weights::ParseSafetensors(files[1].second).value();
  EXPECT_EQ(tensors.size(), 6u);
  const std::string down = "base_model.model.model.layers.1.mlp.down_proj.";
  const std::vector<int64_t> a = {2, 8}, b = {10, 2};
  EXPECT_EQ(tensors.at(down + "lora_A.weight").shape, a);
  EXPECT_EQ(tensors.at("base_model.model.lm_head.lora_B.weight").shape, b);
}

// A model with output gates, heads that rotate by halves, and a gated delta
// rule whose inputs are fused: 2 key heads of one feature, each with 2 value
// heads.
model_config::ModelShape Hybrid() {
  model_config::ModelShape shape = kShape;
  shape.q_width = shape.gate_width = 8;
  shape.kv_width = 4;
  shape.head_order = {0, 2, 1, 3};
  shape.delta = {.layers = {true, false},
                 .key_heads = 2,
                 .value_heads = 4,
                 .key_features = 1,
                 .value_features = 1,
                 .is_fused = true};
  return shape;
}

TEST(PeftFormat, RowsOfHeadsAndOfFusedInputsHaveTheOrderOfFiles) {
  using enum TargetModule;
  const model_config::ModelShape shape = Hybrid();
  const LoraConfig config = {
      .rank = 1,
      .alpha = 1,
      .target_modules = {kQProj, kInProjQkvz, kInProjBa}};
  std::vector<float> values(AdapterLayout(shape, config).num_parameters());
  std::iota(values.begin(), values.end(), 0.0f);
  const PeftFiles files = WritePeft(config, shape, values, "base");
  const auto tensors = weights::ParseSafetensors(files[1].second).value();
  // Returns the row of the layout that each row of the file's B has.
  const auto rows_of = [&](const std::string& path, size_t factor) {
    const weights::TensorView& view =
        tensors.at("base_model.model.model.layers." + path + ".lora_B.weight");
    std::vector<float> rows(view.num_elements());
    EXPECT_THAT(weights::CopyToFloats(view, absl::MakeSpan(rows)), IsOk());
    const AdapterLayout layout(shape, config);
    const auto first = static_cast<float>(layout.factors()[factor].b_offset);
    for (float& row : rows) row -= first;
    return rows;
  };
  EXPECT_EQ(rows_of("0.linear_attn.in_proj_qkvz", 0),
            (std::vector<float>{0, 2, 4, 5, 8, 9, 1, 3, 6, 7, 10, 11}));
  EXPECT_EQ(rows_of("0.linear_attn.in_proj_ba", 1),
            (std::vector<float>{0, 1, 4, 5, 2, 3, 6, 7}));
  EXPECT_EQ(rows_of("1.self_attn.q_proj", 2),
            (std::vector<float>{0, 2, 1, 3, 4, 5, 6, 7, 8, 10, 9, 11, 12, 13,
                                14, 15}));
  const auto adapter = ReadPeft(files, shape).value();
  EXPECT_EQ(adapter.weights, values);
}

TEST(PeftFormat, TheEmbeddingHasNamesOfItsOwn) {
  const LoraConfig config = {
      .rank = 3, .alpha = 1, .target_modules = {TargetModule::kEmbedTokens}};
  const PeftFiles files = WritePeft(config, kShape, Counting(config), "base");
  const auto tensors = weights::ParseSafetensors(files[1].second).value();
  EXPECT_EQ(tensors.size(), 2u);
  const std::string path = "base_model.model.model.embed_tokens.";
  EXPECT_EQ(tensors.at(path + "lora_embedding_A").shape,
            (std::vector<int64_t>{3, 10}));
  EXPECT_EQ(tensors.at(path + "lora_embedding_B").shape,
            (std::vector<int64_t>{4, 3}));
  const auto adapter = ReadPeft(files, kShape).value();
  EXPECT_EQ(adapter.config, config);
  EXPECT_EQ(adapter.weights, Counting(config));
}

TEST(PeftFormat, SkipsCopiesOfTheBaseAndOtherFiles) {
  const std::vector<float> copy(40);
  PeftFiles files = Edited([&](auto& tensors) {
    for (const char* name : {"lm_head.base_layer.weight", "lm_head.weight",
                             "model.embed_tokens.weight"}) {
      tensors.push_back({absl::StrCat("base_model.model.", name),
                         {.shape = {10, 4}, .bytes = BytesOf(copy)}});
    }
  });
  files.emplace_back("README.md", "text");
  const auto adapter = ReadPeft(files, kShape).value();
  EXPECT_EQ(adapter.weights, Counting(HeadAndDown()));
}

TEST(PeftFormat, ReadsHalfAndBrainFloats) {
  // The bits of 1.0 in f16 and in bf16.
  const std::vector<uint16_t> half(40, 0x3c00);
  const std::vector<uint16_t> brain(40, 0x3f80);
  const PeftFiles files = Edited([&](auto& tensors) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      TensorView& view = tensors[i].view;
      const auto& ones = i % 2 == 0 ? half : brain;
      view.dtype = i % 2 == 0 ? ScalarType::kF16 : ScalarType::kBf16;
      view.bytes = BytesOf(ones).first(view.bytes.size() / 2);
    }
  });
  const auto adapter = ReadPeft(files, kShape).value();
  EXPECT_EQ(adapter.weights,
            std::vector<float>(Counting(HeadAndDown()).size(), 1.0f));
}

TEST(PeftFormat, RefusesMissingAndDoubleFiles) {
  PeftFiles files = Written();
  EXPECT_THAT(ReadPeft({files[0]}, kShape),
              IsStatus(kInvalid, "adapter_model.safetensors is missing"));
  EXPECT_THAT(ReadPeft({files[1]}, kShape),
              IsStatus(kInvalid, "adapter_config.json is missing"));
  files.push_back(files[0]);
  EXPECT_THAT(ReadPeft(files, kShape), IsStatus(kInvalid, "there twice"));
}

TEST(PeftFormat, RefusesMissingAndForeignTensors) {
  EXPECT_THAT(
      ReadPeft(Edited([](auto& tensors) { tensors.pop_back(); }), kShape),
      IsStatus(kInvalid, "down_proj.lora_B.weight' is missing"));
  const std::vector<float> one(1);
  for (const char* name :
       {"lm_head.weight", "lm_head.base_layer.weight",
        "base_model.model.model.embed_tokens.base_layer.weight",
        "base_model.model.model.norm.weight",
        "base_model.model.lm_head.lora_magnitude_vector",
        "base_model.model.lm_head.lora_B.bias",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.layers.2.mlp.down_proj.lora_A.weight"}) {
    const PeftFiles files = Edited([&](auto& tensors) {
      tensors.push_back({name, {.shape = {1}, .bytes = BytesOf(one)}});
    });
    EXPECT_THAT(ReadPeft(files, kShape), IsStatus(kInvalid, name));
  }
}

TEST(PeftFormat, RefusesCopiesOfAnotherBase) {
  const std::vector<float> copy(44);
  for (const char* name : {"base_model.model.lm_head.base_layer.weight",
                           "base_model.model.lm_head.weight"}) {
    const PeftFiles files = Edited([&](auto& tensors) {
      tensors.push_back({name, {.shape = {11, 4}, .bytes = BytesOf(copy)}});
    });
    EXPECT_THAT(ReadPeft(files, kShape), IsStatus(kInvalid, name));
    EXPECT_THAT(ReadPeft(files, kShape),
                IsStatus(kInvalid, "[11, 4]; the base model's [10, 4]"));
  }
}

// A model folder whose embedding [10, 4] counts from 0 in steps of 1/4 and that
// has no head. It is removed at the end.
class BaseCopiesTest : public ::testing::Test {
 protected:
  BaseCopiesTest() {
    for (size_t i = 0; i < rows_.size(); ++i) rows_[i] = 0.25F * i;
    const NamedTensor embedding = {"model.embed_tokens.weight",
                                   {.shape = {10, 4}, .bytes = BytesOf(rows_)}};
    folder_.Write("model.safetensors", weights::WriteSafetensors({embedding}));
  }

  // Reads an adapter whose file also has this tensor.
  absl::Status Read(const std::string& name, const TensorView& copy) const {
    return ReadPeft(Edited([&](auto& tensors) {
                      tensors.push_back({name, copy});
                    }),
                    kShape, folder_.path())
        .status();
  }

  std::vector<float> rows_ = std::vector<float>(40);
  const TempFolder folder_;
};

constexpr const char* kCopies[] = {
    "base_model.model.lm_head.base_layer.weight",
    "base_model.model.lm_head.weight",
    "base_model.model.model.embed_tokens.weight"};

TEST_F(BaseCopiesTest, AreAcceptedIfTheyAreEqual) {
  std::vector<uint16_t> rounded;
  for (const float value : rows_) {
    rounded.push_back(std::bit_cast<uint32_t>(value) >> 16);
  }
  const std::vector<double> wide(rows_.begin(), rows_.end());
  for (const char* name : kCopies) {
    EXPECT_THAT(Read(name, {.shape = {10, 4}, .bytes = BytesOf(rows_)}),
                IsOk());
    EXPECT_THAT(Read(name, {.dtype = ScalarType::kF64,
                            .shape = {10, 4},
                            .bytes = BytesOf(wide)}),
                IsOk());
    EXPECT_THAT(Read(name, {.dtype = ScalarType::kBf16,
                            .shape = {10, 4},
                            .bytes = BytesOf(rounded)}),
                IsOk());
  }
}

TEST_F(BaseCopiesTest, AreRefusedIfTheyDiffer) {
  for (const float changed : {rows_[29] + 1e-3F, std::nanf("")}) {
    std::vector<float> other = rows_;
    other[29] = changed;
    other[38] += 1;
    for (const char* name : kCopies) {
      const absl::Status refused =
          Read(name, {.shape = {10, 4}, .bytes = BytesOf(other)});
      EXPECT_THAT(refused, IsStatus(kInvalid, name));
      EXPECT_THAT(refused, IsStatus(kInvalid, "first in row 7. All adapters"));
    }
  }
  // 3 is a number of bf16, but not the rounded number of row 0.
  const std::vector<uint16_t> brain(40, 0x4040);
  EXPECT_THAT(Read(kCopies[0], {.dtype = ScalarType::kBf16,
                                .shape = {10, 4},
                                .bytes = BytesOf(brain)}),
              IsStatus(kInvalid, "first in row 0"));
}

TEST_F(BaseCopiesTest, AreRefusedIfTheFolderLacksTheirBase) {
  const std::vector<float> copy(32);
  EXPECT_THAT(
      Read("base_model.model.model.layers.0.mlp.down_proj.base_layer.weight",
           {.shape = {4, 8}, .bytes = BytesOf(copy)}),
      IsStatus(kInvalid, "so it cannot be compared; remove it"));
}

model_config::ModelShape Wrapped() {
  model_config::ModelShape shape = kShape;
  shape.names = model_config::DecoderNames::kWrapped;
  return shape;
}

LoraConfig EveryModule() {
  return {
      .rank = 2,
      .target_modules = {kAllTargetModules.begin(), kAllTargetModules.end()}};
}

TEST(WrappedModel, WritesTheNamesOfItsClass) {
  const PeftFiles files =
      WritePeft(EveryModule(), Wrapped(), Counting(EveryModule()), "base");
  const auto tensors = weights::ParseSafetensors(files[1].second);
  for (const char* name :
       {"base_model.model.model.language_model.layers.1.mlp.up_proj."
        "lora_A.weight",
        "base_model.model.model.language_model.embed_tokens.lora_embedding_A",
        "base_model.model.lm_head.lora_B.weight"}) {
    EXPECT_TRUE(tensors->contains(name)) << name;
  }
  // Modules of the image parts have the same names.
  EXPECT_THAT(files[0].second, HasSubstr("\"exclude_modules\": "));
  EXPECT_THAT(Written()[0].second, Not(HasSubstr("exclude_modules")));
}

// Returns the files of an adapter with this spelling of the decoder's paths and
// these target_modules.
PeftFiles Spelled(const std::string& prefix, const std::string& targets) {
  const std::string head = prefix == "language_model.model."
                               ? "base_model.model.language_model.lm_head"
                               : "base_model.model.lm_head";
  PeftFiles files = Edited([&](auto& tensors) {
    for (NamedTensor& tensor : tensors) {
      tensor.name = absl::StrReplaceAll(
          tensor.name,
          {{"base_model.model.model.", "base_model.model." + prefix},
           {"base_model.model.lm_head", head}});
    }
  });
  files[0].second = absl::StrCat(
      R"({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": )",
      targets, "}");
  return files;
}

TEST(WrappedModel, EverySpellingIsReadForEveryModel) {
  for (const char* prefix :
       {"model.language_model.", "language_model.model.", "model."}) {
    SCOPED_TRACE(prefix);
    const std::string expression = absl::StrCat(
        "\"", prefix,
        "layers[.][01][.]mlp[.]down_proj|(language_model[.])?lm_head\"");
    for (const std::string& targets :
         {std::string(R"(["down_proj", "lm_head"])"), expression}) {
      for (const model_config::ModelShape& shape : {Wrapped(), kShape}) {
        const auto adapter = ReadPeft(Spelled(prefix, targets), shape).value();
        EXPECT_EQ(adapter.weights, Counting(HeadAndDown()));
      }
    }
  }
}

TEST(WrappedModel, DropsImagePartsThatDoNothingAndRefusesOthers) {
  const std::string path =
      "base_model.model.model.vision_tower.vision_model.encoder.layers.0."
      "mlp.fc1.";
  const std::vector<float> a(4, 1.0F), zero(4), b = {0, 0, 1, 0};
  const auto with_b = [&](const std::vector<float>& values) {
    const auto add = [&](auto& tensors) {
      tensors.push_back(
          {path + "lora_A.weight", {.shape = {1, 4}, .bytes = BytesOf(a)}});
      tensors.push_back({path + "lora_B.weight",
                         {.shape = {4, 1}, .bytes = BytesOf(values)}});
    };
    return Edited(add, Spelled("model.language_model.",
                               R"(["down_proj", "lm_head", "fc1"])"));
  };
  const auto adapter = ReadPeft(with_b(zero), Wrapped()).value();
  EXPECT_EQ(adapter.weights, Counting(HeadAndDown()));
  EXPECT_THAT(ReadPeft(with_b(b), Wrapped()),
              IsStatus(kInvalid, path + "lora_B.weight' changes how the model "
                                        "reads images"));
}

TEST(PeftFormat, RefusesOtherShapesAndTypes) {
  const auto reshape = [](std::vector<int64_t> shape) {
    return Edited([&](auto& tensors) { tensors[0].view.shape = shape; });
  };
  // The shape of lm_head.lora_A is [2, 4].
  EXPECT_THAT(ReadPeft(reshape({4, 2}), kShape),
              IsStatus(kInvalid, "has shape [4, 2]; expected [2, 4]"));
  EXPECT_THAT(ReadPeft(reshape({8}), kShape),
              IsStatus(kInvalid, "has shape [8]; expected [2, 4]"));
  const PeftFiles integers =
      Edited([](auto& tensors) { tensors[0].view.dtype = ScalarType::kI32; });
  EXPECT_THAT(ReadPeft(integers, kShape), IsStatus(kInvalid, "dtype I32"));
}

TEST(PeftFormat, RefusesValuesThatAreNotFinite) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity()}) {
    std::vector<float> values = Counting(HeadAndDown());
    values.back() = bad;
    EXPECT_THAT(ReadPeft(WritePeft(HeadAndDown(), kShape, values, "b"), kShape),
                IsStatus(kInvalid, "lm_head.lora_B.weight' has a value that"));
  }
}

TEST(PeftFormat, RefusesATruncatedFileAsABadArgument) {
  PeftFiles files = Written();
  files[1].second.pop_back();
  EXPECT_THAT(ReadPeft(files, kShape),
              IsStatus(kInvalid, "adapter_model.safetensors: "));
}

TEST(PeftFormat, RefusesALargeRankBeforeItTakesMemory) {
  const model_config::ModelShape large = {.num_layers = 1000,
                                          .hidden = 1 << 17,
                                          .q_width = 1 << 17,
                                          .kv_width = 1 << 17,
                                          .ffn = 1 << 20,
                                          .vocab = 1 << 20};
  PeftFiles files = Written();
  files[0].second = WritePeft({.rank = kMaxFileRank,
                               .target_modules = {TargetModule::kQProj}},
                              {.num_layers = 0}, {}, "b")[0]
                        .second;
  EXPECT_THAT(ReadPeft(files, large), IsStatus(kInvalid, "lm_head"));
}

TEST(Buffers, ComeBackUnderTheirNames) {
  const LoraConfig config = HeadAndDown();
  const std::vector<float> first = Counting(config);
  std::vector<float> second(first.rbegin(), first.rend());
  second[0] = std::numeric_limits<float>::infinity();
  const std::vector<NamedBuffer> buffers = {{"first_moment", first},
                                            {"second_moment", second}};
  const std::string file = WriteBuffers(config, kShape, buffers);
  EXPECT_EQ(*ReadBuffer(file, "first_moment", config, kShape), first);
  EXPECT_EQ(*ReadBuffer(file, "second_moment", config, kShape), second);
  EXPECT_THAT(ReadBuffer(file, "third", config, kShape),
              IsStatus(kInvalid, "'third.model.layers.0"));
  EXPECT_THAT(ReadBuffer(file.substr(0, file.size() - 4), "first_moment",
                         config, kShape),
              IsStatus(absl::StatusCode::kDataLoss, "ends at byte"));
}

}  // namespace
}  // namespace weft::lora::peft_format_test
