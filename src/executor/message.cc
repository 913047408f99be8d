#include "src/executor/message.h"

#include <utility>

#include "src/executor/wire.h"

namespace weft::executor {
namespace {

void Put(Writer& out, const lora::LoraRouting& routing) {
  out.Put(routing.size());
  for (const lora::LoraSegment& segment : routing) {
    out.Put(segment.begin);
    out.Put(segment.end);
    out.Put(segment.version->id.value());
  }
}

void Get(Reader& in, const FindVersion& find, lora::LoraRouting& routing) {
  size_t size = 0;
  in.Get(size);
  for (size_t i = 0; i < size; ++i) {
    lora::LoraSegment segment;
    uint64_t id = 0;
    in.Get(segment.begin);
    in.Get(segment.end);
    in.Get(id);
    segment.version = find(id);
    routing.push_back(std::move(segment));
  }
}

// Calls `each` for every field. `each` either writes or reads the field, so one
// list of fields serves for writing and for reading.
template <typename Rows, typename Each>
void EachField(Rows& rows, const Each& each) requires
    std::is_same_v<std::remove_const_t<Rows>, loss::ScoreRows> {
  each(rows.row_offsets);
  each(rows.targets);
  each(rows.temperatures);
  each(rows.filters);
  each(rows.routing);
}

template <typename Batch, typename Each>
void EachField(Batch& batch, const Each& each) requires
    std::is_same_v<std::remove_const_t<Batch>, model::PackedBatch> {
  each(batch.tokens_T);
  each(batch.positions_T);
  each(batch.nodes);
  each(batch.routing);
  each(batch.experts_TE);
}

template <typename Plan, typename Each>
void EachField(Plan& plan, const Each& each) requires
    std::is_same_v<std::remove_const_t<Plan>, TrainPlan> {
  EachField(plan.batch, each);
  each(plan.score_index_R);
  EachField(plan.rows, each);
  each(plan.backward);
  each(plan.wants_entropy);
  each(plan.wants_routing);
  each(plan.num_recomputed);
}

template <typename Plan, typename Each>
void EachField(Plan& plan, const Each& each) requires
    std::is_same_v<std::remove_const_t<Plan>, CachePlan> {
  EachField(plan.batch, each);
  each(plan.kv.slots_T);
  each(plan.kv.suffixes);
  each(plan.kv.key_slots_S);
  each(plan.kv.decode);
  each(plan.kv.page_table_TL);
  each(plan.kv.lengths_T);
  each(plan.logit_rows);
  each(plan.logit_routing);
  each(plan.draws);
  each(plan.score_rows);
  EachField(plan.scores, each);
}

template <typename Config, typename Each>
void EachField(Config& config, const Each& each) requires
    std::is_same_v<std::remove_const_t<Config>, LoraConfig> {
  each(config.rank);
  each(config.alpha);
  each(config.target_modules);
  each(config.seed);
  each(config.overrides);
}

// Writes the fields of one kind of message.
class Encoder {
 public:
  explicit Encoder(Writer* out) : out_(*out) {}

  void operator()(const CacheSize& m) const { out_.Put(m); }
  void operator()(const NewVersion& m) const {
    out_.Put(m.id);
    EachField(m.config, field_);
  }
  void operator()(const DropVersions& m) const { out_.Put(m.ids); }
  void operator()(const TrainCommand& m) const {
    out_.Put(m.plans.size());
    for (const TrainPlan& plan : m.plans) EachField(plan, field_);
  }
  void operator()(const GradientsCommand& m) const {
    out_.Put(m.gradients_E.size());
    for (const at::Tensor& gradient_E : m.gradients_E) out_.Put(gradient_E);
    out_.Put(m.trained.size());
    for (const std::vector<uint64_t>& ids : m.trained) out_.Put(ids);
  }
  void operator()(const CacheCommand& m) const { EachField(m.plan, field_); }
  void operator()(const CopyPageCommand& m) const { out_.Put(m.copy); }
  void operator()(const StopCommand& /*m*/) const {}

 private:
  struct PutField {
    Writer& out;
    template <typename T>
    void operator()(const T& value) const {
      out.Put(value);
    }
    void operator()(const lora::LoraRouting& routing) const {
      Put(out, routing);
    }
  };

  Writer& out_;
  PutField field_{out_};
};

// Reads what Encoder wrote.
class Decoder {
 public:
  Decoder(Reader* in, const FindVersion& find) : in_(*in), find_(find) {}

  void operator()(CacheSize& m) const { in_.Get(m); }
  void operator()(NewVersion& m) const {
    in_.Get(m.id);
    EachField(m.config, field_);
  }
  void operator()(DropVersions& m) const { in_.Get(m.ids); }
  void operator()(TrainCommand& m) const {
    m.plans.resize(Size());
    for (TrainPlan& plan : m.plans) EachField(plan, field_);
  }
  void operator()(GradientsCommand& m) const {
    m.gradients_E.resize(Size());
    for (at::Tensor& gradient_E : m.gradients_E) in_.Get(gradient_E);
    m.trained.resize(Size());
    for (std::vector<uint64_t>& ids : m.trained) in_.Get(ids);
  }
  void operator()(CacheCommand& m) const { EachField(m.plan, field_); }
  void operator()(CopyPageCommand& m) const { in_.Get(m.copy); }
  void operator()(StopCommand& /*m*/) const {}

 private:
  struct GetField {
    Reader& in;
    const FindVersion& find;
    template <typename T>
    void operator()(T& value) const {
      in.Get(value);
    }
    void operator()(lora::LoraRouting& routing) const {
      Get(in, find, routing);
    }
  };

  [[nodiscard]] size_t Size() const {
    size_t size = 0;
    in_.Get(size);
    return size;
  }

  Reader& in_;
  const FindVersion& find_;
  GetField field_{in_, find_};
};

// Returns an empty message of kind `index`.
template <size_t kIndex = 0>
Message Empty(size_t index) {
  if constexpr (kIndex < std::variant_size_v<Message>) {
    return index == kIndex ? Message(std::in_place_index<kIndex>)
                           : Empty<kIndex + 1>(index);
  } else {
    TORCH_CHECK(false, "a message of unknown kind ", index);
  }
}

}  // namespace

std::string Encode(const Message& message) {
  Writer out;
  out.Put(message.index());
  std::visit(Encoder(&out), message);
  return out.bytes();
}

Message Decode(absl::string_view bytes, const FindVersion& find) {
  Reader in(bytes);
  size_t index = 0;
  in.Get(index);
  Message message = Empty(index);
  std::visit(Decoder(&in, find), message);
  return message;
}

}  // namespace weft::executor
