#include "src/weights/pickle_machine.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace weft::weights {
namespace {

// Run adds the opcode's name to the message.
template <typename... Parts>
absl::Status RefuseOpcode(const Parts&... why) {
  return absl::InvalidArgumentError(absl::StrCat(why...));
}

}  // namespace

absl::Status PickleHeap::Charge(size_t num_items) {
  num_charged_ += num_items;
  if (num_charged_ <= kMaxPickleItems) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("makes more than ", kMaxPickleItems, " items"));
}

absl::StatusOr<PickleValue> PickleHeap::NewTuple(
    absl::Span<const PickleValue> items) {
  WEFT_RETURN_IF_ERROR(Charge(items.size()));
  const auto first = static_cast<int64_t>(items_.size());
  items_.insert(items_.end(), items.begin(), items.end());
  return PickleValue{.kind = PickleKind::kTuple,
                     .size = static_cast<uint32_t>(items.size()),
                     .number = first};
}

absl::StatusOr<PickleValue> PickleHeap::NewDict(bool ordered) {
  WEFT_RETURN_IF_ERROR(Charge(1));
  const auto index = static_cast<int64_t>(dicts_.size());
  dicts_.push_back({.ordered = ordered});
  return PickleValue{.kind = PickleKind::kDict, .number = index};
}

absl::Status PickleHeap::Insert(const PickleValue& dict,
                                absl::Span<const PickleValue> keys_and_values) {
  if (keys_and_values.size() % 2 != 0) {
    return absl::InvalidArgumentError("has a key without a value");
  }
  WEFT_RETURN_IF_ERROR(Charge(keys_and_values.size()));
  auto& entries = dicts_[static_cast<size_t>(dict.number)].entries;
  for (size_t i = 0; i < keys_and_values.size(); i += 2) {
    if (keys_and_values[i].kind != PickleKind::kString) {
      return absl::InvalidArgumentError("has a key that is not a string");
    }
    entries.emplace_back(keys_and_values[i], keys_and_values[i + 1]);
  }
  return absl::OkStatus();
}

std::string PickleOpcodeName(uint8_t opcode) {
  struct Row {
    uint8_t opcode;
    const char* name;
  };
  static constexpr Row kRows[] = {
      {'(', "MARK"},          {')', "EMPTY_TUPLE"},
      {'.', "STOP"},          {'0', "POP"},
      {'1', "POP_MARK"},      {'2', "DUP"},
      {'B', "BINBYTES"},      {'C', "SHORT_BINBYTES"},
      {'F', "FLOAT"},         {'G', "BINFLOAT"},
      {'I', "INT"},           {'J', "BININT"},
      {'K', "BININT1"},       {'L', "LONG"},
      {'M', "BININT2"},       {'N', "NONE"},
      {'P', "PERSID"},        {'Q', "BINPERSID"},
      {'R', "REDUCE"},        {'S', "STRING"},
      {'T', "BINSTRING"},     {'U', "SHORT_BINSTRING"},
      {'V', "UNICODE"},       {'X', "BINUNICODE"},
      {']', "EMPTY_LIST"},    {'a', "APPEND"},
      {'b', "BUILD"},         {'c', "GLOBAL"},
      {'d', "DICT"},          {'e', "APPENDS"},
      {'g', "GET"},           {'h', "BINGET"},
      {'i', "INST"},          {'j', "LONG_BINGET"},
      {'l', "LIST"},          {'o', "OBJ"},
      {'p', "PUT"},           {'q', "BINPUT"},
      {'r', "LONG_BINPUT"},   {'s', "SETITEM"},
      {'t', "TUPLE"},         {'u', "SETITEMS"},
      {'}', "EMPTY_DICT"},    {0x80, "PROTO"},
      {0x81, "NEWOBJ"},       {0x82, "EXT1"},
      {0x83, "EXT2"},         {0x84, "EXT4"},
      {0x85, "TUPLE1"},       {0x86, "TUPLE2"},
      {0x87, "TUPLE3"},       {0x88, "NEWTRUE"},
      {0x89, "NEWFALSE"},     {0x8a, "LONG1"},
      {0x8b, "LONG4"},        {0x8c, "SHORT_BINUNICODE"},
      {0x8d, "BINUNICODE8"},  {0x8e, "BINBYTES8"},
      {0x8f, "EMPTY_SET"},    {0x90, "ADDITEMS"},
      {0x91, "FROZENSET"},    {0x92, "NEWOBJ_EX"},
      {0x93, "STACK_GLOBAL"}, {0x94, "MEMOIZE"},
      {0x95, "FRAME"},        {0x96, "BYTEARRAY8"},
      {0x97, "NEXT_BUFFER"},  {0x98, "READONLY_BUFFER"}};
  for (const Row& row : kRows) {
    if (row.opcode == opcode) return row.name;
  }
  return absl::StrCat("0x", absl::Hex(opcode, absl::kZeroPad2));
}

std::array<PickleMachine::Handler, 256> PickleMachine::Handlers() {
  std::array<Handler, 256> handlers{};
  const std::pair<unsigned char, Handler> rows[] = {
      {0x80, &PickleMachine::Proto},
      {0x95, &PickleMachine::Frame},
      {'.', &PickleMachine::Stop},
      {'(', &PickleMachine::Mark},
      {'N', &PickleMachine::Constant<PickleKind::kNone, 0>},
      {0x88, &PickleMachine::Constant<PickleKind::kBool, 1>},
      {0x89, &PickleMachine::Constant<PickleKind::kBool, 0>},
      {'K', &PickleMachine::Unsigned<1>},
      {'M', &PickleMachine::Unsigned<2>},
      {'J', &PickleMachine::BinInt},
      {0x8a, &PickleMachine::Long1},
      {'G', &PickleMachine::BinFloat},
      {0x8c, &PickleMachine::String<1>},
      {'X', &PickleMachine::String<4>},
      {0x8d, &PickleMachine::String<8>},
      {')', &PickleMachine::ShortTuple<0>},
      {0x85, &PickleMachine::ShortTuple<1>},
      {0x86, &PickleMachine::ShortTuple<2>},
      {0x87, &PickleMachine::ShortTuple<3>},
      {'t', &PickleMachine::Tuple},
      {']', &PickleMachine::Constant<PickleKind::kList, 0>},
      {'a', &PickleMachine::Append},
      {'e', &PickleMachine::Appends},
      {'}', &PickleMachine::EmptyDict},
      {'s', &PickleMachine::SetItem},
      {'u', &PickleMachine::SetItems},
      {'q', &PickleMachine::Put<1>},
      {'r', &PickleMachine::Put<4>},
      {0x94, &PickleMachine::Memoize},
      {'h', &PickleMachine::Get<1>},
      {'j', &PickleMachine::Get<4>},
      {'c', &PickleMachine::GlobalByLine},
      {0x93, &PickleMachine::GlobalByStack},
      {'Q', &PickleMachine::Persistent},
      {'R', &PickleMachine::Reduce},
      {'b', &PickleMachine::Build}};
  for (const auto& [opcode, handler] : rows) handlers[opcode] = handler;
  return handlers;
}

absl::StatusOr<PickleValue> PickleMachine::Run() {
  while (!stopped_) {
    opcode_offset_ = in_.position();
    opcode_ = in_.U8();
    if (!in_.ok()) {
      return absl::DataLossError(
          absl::StrCat("pickle of ", pickle_.size(), " bytes has no STOP"));
    }
    const absl::Status done = Step();
    if (done.ok() && in_.ok()) continue;
    const std::string where = absl::StrCat("opcode ", PickleOpcodeName(opcode_),
                                           " at byte ", opcode_offset_);
    // A read past the end returns zeros, and the zeros may cause an error in
    // Step. So this check comes before Step's error.
    if (!in_.ok()) {
      return absl::DataLossError(absl::StrCat("pickle ends inside ", where));
    }
    return absl::Status(done.code(),
                        absl::StrCat("pickle ", where, " ", done.message()));
  }
  return stack_[0];
}

absl::Status PickleMachine::Step() {
  static const std::array<Handler, 256> kHandlers = Handlers();
  if (opcode_offset_ == 0 && opcode_ != 0x80) {
    return RefuseOpcode("is not the PROTO that a pickle starts with");
  }
  const Handler handler = kHandlers[opcode_];
  if (handler == nullptr) return RefuseOpcode("has no place in a state dict");
  return (this->*handler)();
}

absl::Status PickleMachine::Push(absl::StatusOr<PickleValue> value) {
  if (!value.ok()) return value.status();
  if (stack_.size() == kMaxPickleStack) {
    return RefuseOpcode("needs a stack > limit ", kMaxPickleStack);
  }
  stack_.push_back(*value);
  return absl::OkStatus();
}

absl::Status PickleMachine::Pop(PickleValue& value) {
  if (stack_.size() <= Floor()) return RefuseOpcode("finds the stack empty");
  value = stack_.back();
  stack_.pop_back();
  return absl::OkStatus();
}

absl::Status PickleMachine::PopMark(std::vector<PickleValue>& items) {
  if (marks_.empty()) return RefuseOpcode("finds no mark");
  items.assign(stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back()),
               stack_.end());
  stack_.resize(marks_.back());
  marks_.pop_back();
  return absl::OkStatus();
}

absl::Status PickleMachine::Top(PickleKind kind, PickleValue& value) const {
  if (stack_.size() <= Floor()) return RefuseOpcode("finds the stack empty");
  value = stack_.back();
  return value.kind == kind ? absl::OkStatus()
                            : RefuseOpcode("is for another type");
}

absl::Status PickleMachine::Proto() {
  const uint8_t version = in_.U8();
  if (opcode_offset_ != 0) return RefuseOpcode("is not at the start");
  if (version < 2 || version > 5) {
    return RefuseOpcode("has version ", version, "; 2 to 5 are known");
  }
  return absl::OkStatus();
}

absl::Status PickleMachine::Frame() {
  if (in_.U64() > in_.remaining())
    return RefuseOpcode("is longer than the pickle");
  return absl::OkStatus();
}

absl::Status PickleMachine::Stop() {
  if (stack_.size() != 1 || !marks_.empty()) {
    return RefuseOpcode("leaves ", stack_.size(), " values instead of one");
  }
  if (in_.remaining() != 0) {
    return RefuseOpcode("has ", in_.remaining(), " bytes after it");
  }
  stopped_ = true;
  return absl::OkStatus();
}

absl::Status PickleMachine::Mark() {
  if (marks_.size() == kMaxPickleStack) {
    return RefuseOpcode("is one more than ", kMaxPickleStack);
  }
  marks_.push_back(stack_.size());
  return absl::OkStatus();
}

template <PickleKind kKind, int kNumber>
absl::Status PickleMachine::Constant() {
  return Push(PickleValue{.kind = kKind, .number = kNumber});
}

template <size_t kBytes>
absl::Status PickleMachine::Unsigned() {
  return Push(PickleValue{.kind = PickleKind::kInt,
                          .number = static_cast<int64_t>(in_.Uint(kBytes))});
}

absl::Status PickleMachine::BinInt() {
  return Push(PickleValue{.kind = PickleKind::kInt,
                          .number = static_cast<int32_t>(in_.U32())});
}

absl::Status PickleMachine::Long1() {
  const size_t bytes = in_.U8();
  if (bytes > sizeof(int64_t)) {
    return RefuseOpcode("has an integer of ", bytes, " bytes > 8");
  }
  uint64_t bits = in_.Uint(bytes);
  // Extends the sign: the number is in two's complement of `bytes` bytes.
  if (bytes > 0 && bytes < sizeof(bits) && (bits >> (8 * bytes - 1)) != 0) {
    bits |= ~uint64_t{0} << (8 * bytes);
  }
  return Push(PickleValue{.kind = PickleKind::kInt,
                          .number = static_cast<int64_t>(bits)});
}

absl::Status PickleMachine::BinFloat() {
  (void)in_.U64();
  return Push(PickleValue{.kind = PickleKind::kFloat});
}

template <size_t kBytes>
absl::Status PickleMachine::String() {
  const uint64_t bytes = in_.Uint(kBytes);
  if (bytes > kMaxPickleString) {
    return RefuseOpcode("has a string of ", bytes, " bytes > limit ",
                        kMaxPickleString);
  }
  const auto offset = static_cast<int64_t>(in_.position());
  const auto size = static_cast<uint32_t>(in_.Bytes(bytes).size());
  return Push(
      PickleValue{.kind = PickleKind::kString, .size = size, .number = offset});
}

absl::Status PickleMachine::Tuple() {
  std::vector<PickleValue> items;
  WEFT_RETURN_IF_ERROR(PopMark(items));
  return Push(heap_.NewTuple(items));
}

template <size_t kItems>
absl::Status PickleMachine::ShortTuple() {
  std::array<PickleValue, kItems> items;
  for (size_t i = kItems; i > 0; --i) {
    WEFT_RETURN_IF_ERROR(Pop(items[i - 1]));
  }
  return Push(heap_.NewTuple(items));
}

absl::Status PickleMachine::EmptyDict() {
  return Push(heap_.NewDict(/*ordered=*/false));
}

absl::Status PickleMachine::Append() {
  PickleValue value;
  WEFT_RETURN_IF_ERROR(Pop(value));
  return Top(PickleKind::kList, value);
}

absl::Status PickleMachine::Appends() {
  std::vector<PickleValue> items;
  WEFT_RETURN_IF_ERROR(PopMark(items));
  PickleValue list;
  return Top(PickleKind::kList, list);
}

absl::Status PickleMachine::SetItem() {
  std::array<PickleValue, 2> pair;
  WEFT_RETURN_IF_ERROR(Pop(pair[1]));
  WEFT_RETURN_IF_ERROR(Pop(pair[0]));
  PickleValue dict;
  WEFT_RETURN_IF_ERROR(Top(PickleKind::kDict, dict));
  return heap_.Insert(dict, pair);
}

absl::Status PickleMachine::SetItems() {
  std::vector<PickleValue> items;
  WEFT_RETURN_IF_ERROR(PopMark(items));
  PickleValue dict;
  WEFT_RETURN_IF_ERROR(Top(PickleKind::kDict, dict));
  return heap_.Insert(dict, items);
}

// Stores the top of the stack in the memo. Writers number the entries in order.
// Refuses an index that skips entries, so that a short hostile pickle cannot
// make the memo large.
absl::Status PickleMachine::MemoPut(uint64_t index) {
  if (stack_.size() <= Floor()) return RefuseOpcode("finds the stack empty");
  if (index > memo_.size()) {
    return RefuseOpcode("skips to memo entry ", index, " from ", memo_.size());
  }
  if (index == memo_.size()) {
    WEFT_RETURN_IF_ERROR(heap_.Charge(1));
    memo_.emplace_back();
  }
  memo_[index] = stack_.back();
  return absl::OkStatus();
}

template <size_t kBytes>
absl::Status PickleMachine::Put() {
  return MemoPut(in_.Uint(kBytes));
}

absl::Status PickleMachine::Memoize() { return MemoPut(memo_.size()); }

template <size_t kBytes>
absl::Status PickleMachine::Get() {
  const uint64_t index = in_.Uint(kBytes);
  if (index >= memo_.size()) {
    return RefuseOpcode("wants memo entry ", index, " of ", memo_.size());
  }
  return Push(memo_[index]);
}

absl::Status PickleMachine::GlobalByLine() {
  const absl::string_view module = in_.Line();
  const absl::string_view name = in_.Line();
  return Push(objects_.Global(module, name));
}

absl::Status PickleMachine::GlobalByStack() {
  PickleValue name;
  PickleValue module;
  WEFT_RETURN_IF_ERROR(Pop(name));
  WEFT_RETURN_IF_ERROR(Pop(module));
  if (name.kind != PickleKind::kString || module.kind != PickleKind::kString) {
    return RefuseOpcode("has a name that is not a string");
  }
  return Push(objects_.Global(heap_.Text(module), heap_.Text(name)));
}

absl::Status PickleMachine::Persistent() {
  PickleValue id;
  WEFT_RETURN_IF_ERROR(Pop(id));
  return Push(objects_.Persistent(id));
}

absl::Status PickleMachine::Reduce() {
  PickleValue arguments;
  PickleValue function;
  WEFT_RETURN_IF_ERROR(Pop(arguments));
  WEFT_RETURN_IF_ERROR(Pop(function));
  if (arguments.kind != PickleKind::kTuple ||
      function.kind != PickleKind::kGlobal) {
    return RefuseOpcode("does not call a function with a tuple");
  }
  return Push(objects_.Call(function, heap_.Items(arguments)));
}

absl::Status PickleMachine::Build() {
  PickleValue state;
  WEFT_RETURN_IF_ERROR(Pop(state));
  if (stack_.size() <= Floor()) return RefuseOpcode("finds the stack empty");
  return objects_.SetState(stack_.back(), state);
}

}  // namespace weft::weights
