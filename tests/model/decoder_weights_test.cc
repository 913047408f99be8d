// Tests into which weights a checkpoint's tensors are loaded. Also tests how a
// norm is rounded if the checkpoint stores the norm's weight minus one.
#include "src/model/decoder_weights.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "src/model/decoder.h"
#include "src/model_config/weight_list.h"
#include "src/ops/rms_norm.h"
#include "src/weights/safetensors.h"
#include "tests/model/shard_weights.h"
#include "tests/model/tiny_model.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace weft::model {
namespace {

// A checkpoint of one Gemma layer in bf16, with a tensor that the decoder does
// not use.
class GemmaCheckpointTest : public ::testing::Test {
 protected:
  GemmaCheckpointTest() : config_(TinyConfig(/*num_layers=*/1)) {
    config_.qk_norm = model_config::QkNorm::kHead;
    config_.norms = model_config::kGemmaNorms;
    config_.norms_from_one = true;
    config_.scaled_embeddings = true;
    at::manual_seed(31);
    const model_config::ModelShape shape = config_.shape();
    Add("embed_tokens", {shape.vocab, shape.hidden});
    Add("norm", {shape.hidden});
    for (const char* name :
         {"input_layernorm", "post_attention_layernorm",
          "pre_feedforward_layernorm", "post_feedforward_layernorm"}) {
      Add(Layer(name), {shape.hidden});
    }
    Add(Layer("self_attn.q_norm"), {config_.head_dim});
    Add(Layer("self_attn.k_norm"), {config_.head_dim});
    Add(Layer("self_attn.q_proj"), {shape.q_width, shape.hidden});
    Add(Layer("self_attn.k_proj"), {shape.kv_width, shape.hidden});
    Add(Layer("self_attn.v_proj"), {shape.kv_width, shape.hidden});
    Add(Layer("self_attn.o_proj"), {shape.hidden, shape.q_width});
    Add(Layer("mlp.gate_proj"), {shape.ffn, shape.hidden});
    Add(Layer("mlp.up_proj"), {shape.ffn, shape.hidden});
    Add(Layer("mlp.down_proj"), {shape.hidden, shape.ffn});
  }

  static std::string Layer(const std::string& name) {
    return "layers.0." + name;
  }

  void Add(const std::string& name, const std::vector<int64_t>& shape) {
    tensors_[name] = (at::randn(shape) * 0.2).to(at::kBFloat16);
  }

  // Adds a bias to each projection.
  void AddBiases() {
    config_.qkv_bias = config_.o_bias = config_.mlp_bias = true;
    const model_config::ModelShape shape = config_.shape();
    Add(Layer("self_attn.q_proj.bias"), {shape.q_width});
    Add(Layer("self_attn.k_proj.bias"), {shape.kv_width});
    Add(Layer("self_attn.v_proj.bias"), {shape.kv_width});
    Add(Layer("self_attn.o_proj.bias"), {shape.hidden});
    Add(Layer("mlp.gate_proj.bias"), {shape.ffn});
    Add(Layer("mlp.up_proj.bias"), {shape.ffn});
    Add(Layer("mlp.down_proj.bias"), {shape.hidden});
  }

  // Stores every tensor under `prefix`, and a vision tensor.
  std::unique_ptr<weights::Checkpoint> Store(const std::string& prefix) {
    std::vector<weights::NamedTensor> views;
    const auto add = [&](const std::string& name, const at::Tensor& tensor) {
      const auto* bytes =
          static_cast<const std::byte*>(tensor.const_data_ptr());
      views.push_back({.name = name,
                       .view = {.dtype = weights::ScalarType::kBf16,
                                .shape = tensor.sizes().vec(),
                                .bytes = {bytes, tensor.nbytes()}}});
    };
    for (const auto& [name, tensor] : tensors_) {
      add(prefix + name + (name.ends_with(".bias") ? "" : ".weight"), tensor);
    }
    const at::Tensor other = at::ones({3}, at::kBFloat16);
    add("vision_tower.vision_model.layers.0.input_layernorm.weight", other);
    folder_.Write("model.safetensors", weights::WriteSafetensors(views));
    return weights::Checkpoint::Open(folder_.path()).value();
  }

  DecoderWeights Load(const std::string& prefix, at::ScalarType dtype) {
    const auto checkpoint = Store(prefix);
    return LoadDecoderWeights(*checkpoint, config_, dtype, at::kCPU).value();
  }

  model_config::ModelConfig config_;
  const TempFolder folder_;
  std::map<std::string, at::Tensor> tensors_;
};

TEST_F(GemmaCheckpointTest, NormsAreOneMoreThanInTheFileAndInF32) {
  for (const char* prefix :
       {"model.", "language_model.model.", "model.language_model."}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const DecoderWeights w = Load(prefix, dtype);
      const auto expect = [&](const at::Tensor& norm, const std::string& name) {
        EXPECT_EQ(norm.scalar_type(), at::kFloat);
        EXPECT_TRUE(at::equal(norm, tensors_.at(name).to(at::kFloat) + 1))
            << prefix << name;
      };
      const LayerWeights& layer = w.layers[0];
      expect(layer.input_norm_H, Layer("input_layernorm"));
      expect(layer.attention_out_norm_H, Layer("post_attention_layernorm"));
      expect(layer.mlp_norm_H, Layer("pre_feedforward_layernorm"));
      expect(layer.mlp_out_norm_H, Layer("post_feedforward_layernorm"));
      expect(layer.q_norm_C, Layer("self_attn.q_norm"));
      expect(layer.k_norm_C, Layer("self_attn.k_norm"));
      expect(w.final_norm_H, "norm");
      EXPECT_EQ(w.embedding_VH.scalar_type(), dtype);
    }
  }
}

// transformers computes (x / rms(x)).float() * (1.0 + w.float()), rounded once.
TEST_F(GemmaCheckpointTest, NormedRowsHaveTheBitsOfTheModelsOwnCode) {
  const DecoderWeights w = Load("model.", at::kBFloat16);
  const at::Tensor x = at::randn({7, config_.hidden}).to(at::kBFloat16);
  at::Tensor y = at::empty_like(x);
  ops::RmsNorm(x, w.final_norm_H, config_.rms_norm_eps, y);
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor normed =
      wide *
      at::rsqrt(wide.pow(2).mean(-1, /*keepdim=*/true) + config_.rms_norm_eps);
  const at::Tensor expected =
      (normed * (tensors_.at("norm").to(at::kFloat) + 1.0)).to(at::kBFloat16);
  EXPECT_TRUE(at::equal(y, expected));
}

// transformers computes embedding * torch.tensor(sqrt(hidden)).to(dtype).
TEST_F(GemmaCheckpointTest, EmbeddingsAreScaledByARoundedFactor) {
  config_.num_layers = 0;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const Decoder decoder(config_, Load("model.", dtype), 8);
    const at::Tensor tokens = at::arange(config_.vocab);
    const at::Tensor x = decoder.ForwardLayers(
        Mode::kEval, {.tokens_T = tokens}, /*tape=*/nullptr,
        /*num_recomputed=*/0, /*kv=*/nullptr);
    const float factor =
        at::scalar_tensor(std::sqrt(24.0), dtype).item<float>();
    EXPECT_TRUE(
        at::equal(x, tensors_.at("embed_tokens").to(at::kFloat) * factor));
    EXPECT_EQ(factor, dtype == at::kBFloat16 ? 4.90625F : 4.898979486F);
  }
}

TEST_F(GemmaCheckpointTest, AStrayTensorOfALayerIsRefusedByName) {
  Add(Layer("self_attn.v_norm"), {config_.head_dim});
  const auto checkpoint = Store("model.");
  EXPECT_THAT(
      LoadDecoderWeights(*checkpoint, config_, at::kFloat, at::kCPU),
      IsStatus(absl::StatusCode::kInvalidArgument,
               "tensor 'model.layers.0.self_attn.v_norm.weight' has no place"));
}

TEST_F(GemmaCheckpointTest, TensorsOfLayersThatAreCutOffAreLeftAlone) {
  Add("layers.1.self_attn.q_proj", {2, 2});
  EXPECT_EQ(Load("model.", at::kFloat).layers.size(), 1);
}

TEST_F(GemmaCheckpointTest, AllNamesAreFoundBeforeAnythingIsRead) {
  tensors_.erase("norm");
  const auto checkpoint = Store("model.");
  const uint64_t before = checkpoint->bytes_read();
  EXPECT_THAT(LoadDecoderWeights(*checkpoint, config_, at::kFloat, at::kCPU),
              IsStatus(absl::StatusCode::kNotFound, "'model.norm.weight'"));
  EXPECT_EQ(checkpoint->bytes_read(), before);
}

TEST_F(GemmaCheckpointTest, ATiedHeadMayBeThereOnlyWithTheSameValues) {
  config_.tied_embeddings = true;
  tensors_["lm_head"] = tensors_.at("embed_tokens").clone();
  const DecoderWeights w = Load("", at::kFloat);
  EXPECT_TRUE(w.head_VH.is_same(w.embedding_VH));
  tensors_["lm_head"][3][2] += 1;
  const auto checkpoint = Store("");
  EXPECT_THAT(LoadDecoderWeights(*checkpoint, config_, at::kFloat, at::kCPU),
              IsStatus(absl::StatusCode::kInvalidArgument,
                       "tensor 'lm_head.weight' differs from "
                       "'model.embed_tokens.weight'"));
}

void ExpectSame(const at::Tensor& a, const at::Tensor& b, int line) {
  ASSERT_EQ(a.defined(), b.defined()) << line;
  EXPECT_TRUE(!a.defined() || at::equal(a, b)) << line;
}

void ExpectSame(const DecoderWeights& a, const DecoderWeights& b) {
  ExpectSame(a.embedding_VH, b.embedding_VH, __LINE__);
  ExpectSame(a.final_norm_H, b.final_norm_H, __LINE__);
  ExpectSame(a.head_VH, b.head_VH, __LINE__);
  ASSERT_EQ(a.layers.size(), b.layers.size());
  for (size_t i = 0; i < a.layers.size(); ++i) {
    const LayerWeights& v = a.layers[i];
    const LayerWeights& w = b.layers[i];
    ExpectSame(v.input_norm_H, w.input_norm_H, __LINE__);
    ExpectSame(v.qkv.weight_OI, w.qkv.weight_OI, __LINE__);
    ExpectSame(v.qkv.bias_O, w.qkv.bias_O, __LINE__);
    ExpectSame(v.q_norm_C, w.q_norm_C, __LINE__);
    ExpectSame(v.k_norm_C, w.k_norm_C, __LINE__);
    ExpectSame(v.o.weight_OI, w.o.weight_OI, __LINE__);
    ExpectSame(v.o.bias_O, w.o.bias_O, __LINE__);
    ExpectSame(v.attention_out_norm_H, w.attention_out_norm_H, __LINE__);
    ExpectSame(v.mlp_norm_H, w.mlp_norm_H, __LINE__);
    ExpectSame(v.gate_up.weight_OI, w.gate_up.weight_OI, __LINE__);
    ExpectSame(v.gate_up.bias_O, w.gate_up.bias_O, __LINE__);
    ExpectSame(v.down.weight_OI, w.down.weight_OI, __LINE__);
    ExpectSame(v.down.bias_O, w.down.bias_O, __LINE__);
    ExpectSame(v.mlp_out_norm_H, w.mlp_out_norm_H, __LINE__);
    ExpectSame(v.experts.router_EH, w.experts.router_EH, __LINE__);
    ExpectSame(v.experts.gate_up_GH, w.experts.gate_up_GH, __LINE__);
    ExpectSame(v.experts.down_DF, w.experts.down_DF, __LINE__);
    ExpectSame(v.experts.shared_gate_up_S2H, w.experts.shared_gate_up_S2H,
               __LINE__);
    ExpectSame(v.experts.shared_down_HS, w.experts.shared_down_HS, __LINE__);
  }
}

// Returns the bytes that loading `w` reads from a bf16 checkpoint.
int64_t NumBytesRead(const DecoderWeights& w, bool tied) {
  int64_t count = w.embedding_VH.numel() + w.final_norm_H.numel();
  if (!tied) count += w.head_VH.numel();
  for (const LayerWeights& l : w.layers) {
    for (const at::Tensor& tensor :
         {l.input_norm_H, l.qkv.weight_OI, l.qkv.bias_O, l.q_norm_C, l.k_norm_C,
          l.o.weight_OI, l.o.bias_O, l.attention_out_norm_H, l.mlp_norm_H,
          l.gate_up.weight_OI, l.gate_up.bias_O, l.down.weight_OI,
          l.down.bias_O, l.mlp_out_norm_H}) {
      if (tensor.defined()) count += tensor.numel();
    }
  }
  return count * 2;
}

TEST_F(GemmaCheckpointTest, RanksReadTheirPartsAndNoOtherByte) {
  AddBiases();
  const at::Tensor head =
      at::randn({config_.vocab, config_.hidden}).to(at::kBFloat16);
  for (const bool tied : {false, true}) {
    config_.tied_embeddings = tied;
    tensors_.erase("lm_head");
    if (!tied) tensors_["lm_head"] = head;
    const DecoderWeights whole = Load("model.", at::kFloat);
    for (const int size : {2, 3, 4}) {
      for (int rank = 0; rank < size; ++rank) {
        SCOPED_TRACE(::testing::Message() << rank << " of " << size);
        const parallel::Shard shard{.rank = rank, .size = size};
        const auto checkpoint = Store("model.");
        const uint64_t before = checkpoint->bytes_read();
        const auto part = LoadDecoderWeights(*checkpoint, config_, at::kFloat,
                                             at::kCPU, shard)
                              .value();
        ExpectSame(part, testing::ShardWeights(whole, config_, shard));
        EXPECT_EQ(checkpoint->bytes_read() - before, NumBytesRead(part, tied));
        EXPECT_EQ(part.head_VH.is_same(part.embedding_VH), tied);
      }
    }
  }
}

TEST_F(GemmaCheckpointTest, RanksCompareTheirPartOfATiedHead) {
  config_.tied_embeddings = true;
  tensors_["lm_head"] = tensors_.at("embed_tokens").clone();
  tensors_["lm_head"][config_.vocab - 1][2] += 1;
  const auto checkpoint = Store("");
  const auto load = [&](int rank) {
    return LoadDecoderWeights(*checkpoint, config_, at::kFloat, at::kCPU,
                              {.rank = rank, .size = 2})
        .status();
  };
  EXPECT_THAT(load(0), IsOk());
  EXPECT_THAT(load(1), IsStatus(absl::StatusCode::kInvalidArgument,
                                "tensor 'lm_head.weight' differs"));
}

TEST(MakeDummyWeights, OfRanksArePartsOfTheWhole) {
  model_config::ModelConfig config = TinyConfig(/*num_layers=*/2);
  config.qk_norm = model_config::QkNorm::kHead;
  config.norms = model_config::kGemmaNorms;
  config.qkv_bias = config.o_bias = config.mlp_bias = true;
  config.moe.shape = {.count = 7,
                      .per_token = 2,
                      .ffn = 9,
                      .shared_ffn = 20,
                      .layers = {true, false}};
  for (const bool tied : {false, true}) {
    config.tied_embeddings = tied;
    config.moe.expert_groups = tied ? 3 : 1;
    const DecoderWeights whole =
        MakeDummyWeights(config, at::kBFloat16, at::kCPU, /*seed=*/3);
    for (int rank = 0; rank < 3; ++rank) {
      const parallel::Shard shard{.rank = rank, .size = 3};
      ExpectSame(
          MakeDummyWeights(config, at::kBFloat16, at::kCPU, /*seed=*/3, shard),
          testing::ShardWeights(whole, config, shard));
    }
  }
}

TEST(WeightBytes, AreThoseOfTheBufferThatHoldsARanksPart) {
  model_config::ModelConfig config = TinyConfig(/*num_layers=*/2);
  config.qk_norm = model_config::QkNorm::kHead;
  config.norms = model_config::kGemmaNorms;
  config.qkv_bias = config.o_bias = config.mlp_bias = true;
  for (const bool wide_norms : {false, true}) {
    config.norms_from_one = wide_norms;
    config.tied_embeddings = wide_norms;
    for (int rank = 0; rank < 2; ++rank) {
      const parallel::Shard shard{.rank = rank, .size = 2};
      const DecoderWeights weights =
          MakeDummyWeights(config, at::kBFloat16, at::kCPU, /*seed=*/3, shard);
      EXPECT_EQ(static_cast<int64_t>(weights.embedding_VH.storage().nbytes()),
                model_config::WeightBytes(config, /*element_bytes=*/2, shard));
    }
  }
}

TEST(MakeDummyWeights, FollowTheSeedAlone) {
  const model_config::ModelConfig config = TinyConfig(/*num_layers=*/2);
  const auto make = [&](uint64_t seed) {
    return MakeDummyWeights(config, at::kFloat, at::kCPU, seed);
  };
  const DecoderWeights a = make(1);
  const DecoderWeights b = make(1);
  const DecoderWeights c = make(2);
  const auto qkv = [](const DecoderWeights& w, int layer) {
    return w.layers[layer].qkv.weight_OI;
  };
  EXPECT_TRUE(at::equal(qkv(a, 1), qkv(b, 1)));
  EXPECT_FALSE(at::equal(qkv(a, 1), qkv(c, 1)));
  EXPECT_FALSE(at::equal(qkv(a, 0), qkv(a, 1)));
  EXPECT_TRUE(at::equal(a.final_norm_H, at::ones({config.hidden})));
  EXPECT_EQ(a.head_VH.size(0), config.vocab);
  const Decoder decoder(config, a, 8);
  const at::Tensor x = decoder.ForwardLayers(
      Mode::kEval,
      {.tokens_T = at::arange(8),
       .positions_T = at::arange(8, at::kInt),
       .nodes = {{.begin = 0, .end = 8, .subtree_end = 8}}},
      /*tape=*/nullptr, /*num_recomputed=*/0, /*kv=*/nullptr);
  EXPECT_TRUE(x.isfinite().all().item<bool>());
}

}  // namespace
}  // namespace weft::model
