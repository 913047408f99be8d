// Every value an operator can set, with default, unit and range.
// server/flags.cc fills these structs from flags and environment; nothing else
// reads flags.
#ifndef WEFT_SRC_CONFIG_OPTIONS_H_
#define WEFT_SRC_CONFIG_OPTIONS_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "src/base/log.h"

namespace weft {

enum class Device { kCpu, kCuda, kAuto };
enum class Dtype { kF32, kBf16, kAuto };
// Where weights come from. kAuto: the files of the model's folder. kDummy:
// random numbers, in the shapes that config.json gives.
enum class LoadFormat { kAuto, kDummy };
// What --max-resident-adapters=0 stands for, unless fewer fit the device.
inline constexpr int kDefaultResidentAdapters = 64;

// Which layers keep only their input and run again in the backward pass.
// kAuto: as few as the memory budget asks for.
enum class GradientCheckpointing { kOff, kAll, kAuto };

// What the engine runs and how much of it.
struct EngineOptions {
  std::string model_dir;  // Hugging Face folder; required.
  // Adapter checkpoints; created when missing. Empty: "checkpoints" in the
  // working directory.
  std::string checkpoint_dir;
  // What the server must not forget: the log of all steps, and snapshots of the
  // adapters. Empty: it forgets all that is in no checkpoint.
  std::string state_dir;
  // A snapshot is due when the log since the last one has so many bytes, or
  // would take so long to run again.
  int64_t snapshot_log_bytes = int64_t{1} << 30;
  int snapshot_replay_seconds = 120;
  Device device = Device::kAuto;
  Dtype dtype = Dtype::kAuto;
  LoadFormat load_format = LoadFormat::kAuto;
  int tensor_parallel_size = 1;  // Ranks that share every layer, [1, 64].
  int data_parallel_size = 1;    // Replicas that share the data, [1, 64].
  // Compute threads of a rank on the CPU. 0: the rank's share of all cores.
  int num_threads = 0;
  int max_adapters = 1024;          // [1, 100000]
  int max_adapters_per_tenant = 0;  // 0: max_adapters; never more.
  // How many of these the device holds at a time, [0, 100000]. 0: 64, or on
  // CUDA as many of 64 as fit.
  int max_resident_adapters = 0;
  // Host memory for adapters off the device; beyond it they go to disk.
  // 0: by device; -1: none.
  int64_t adapter_host_bytes = 0;
  int max_rank = 64;             // [1, 1024]
  int max_context_tokens = 0;    // 0: the model's; never more than the model's.
  int64_t max_batch_tokens = 0;  // In a training micro-batch; 0: by device.
  int64_t loss_chunk_size = 1024;  // Score rows per head chunk; 0 or -1: all.
  GradientCheckpointing gradient_checkpointing = GradientCheckpointing::kAuto;
  int64_t memory_budget_bytes = 0;  // For a micro-batch's activations; 0: auto.
  // The part of a CUDA device's memory that may be taken; [0.05, 1].
  double device_memory_share = 0.9;
  bool share_prompts = true;           // Run equal beginnings of data once.
  int64_t max_queue_requests = 1024;   // Waiting requests; >= 1.
  int64_t max_queue_tokens = 4 << 20;  // Their tokens; >= 1.
  // The limits of one tenant, at most those above. 0: a quarter of those.
  int64_t max_queue_requests_per_tenant = 0;
  int64_t max_queue_tokens_per_tenant = 0;
  // Replies kept for repeated calls, of all adapters; the oldest go first.
  int64_t max_stored_reply_bytes = int64_t{256} << 20;
  std::string tenant_weights;     // As ParseTenantWeights reads.
  int64_t kv_cache_bytes = 0;     // 0: sized from the machine.
  int max_decode_sequences = 64;  // Sequences per decode iteration.
  bool decode_graphs = true;      // Runs them as graphs, on CUDA.
  // Sampling's part of device time while training waits too; [0.01, 0.99].
  double sampling_share = 0.5;

  // INVALID_ARGUMENT naming every flag that is out of range, its value and
  // the range, one per line.
  [[nodiscard]] absl::Status Validate() const;
};

// The name under which metrics add up the tenants without a weight.
inline constexpr char kOtherTenants[] = "other";

// Reads "NAME=WEIGHT,...", weights in [1, 1000]: the shares of tenants; those
// that are not named have 1. INVALID_ARGUMENT naming the entry; kOtherTenants
// is no name.
[[nodiscard]] absl::StatusOr<std::map<std::string, int64_t>> ParseTenantWeights(
    absl::string_view text);

// kAuto: text on a terminal, JSON lines otherwise.
enum class LogStyle { kAuto, kText, kJson };

// What the server listens on and accepts.
struct ServerOptions {
  std::string listen = "127.0.0.1:50051";
  std::string metrics_listen = "127.0.0.1:9400";  // Empty: no metrics endpoint.
  std::string port_file;   // Written once listening: one HOST:PORT a line.
  std::string model_name;  // Empty: last part of the model folder.
  std::string torch_dir;   // Empty: the LibTorch that weftd was linked with.
  // 0: half of the open files that the system grants, at most 10000.
  int max_connections = 0;
  int64_t max_message_bytes = 64 << 20;  // [1 KiB, 2 GiB)
  int64_t max_import_bytes = 2LL << 30;  // All imports under way together.
  int max_data_per_request = 4096;
  int64_t max_tokens_per_request = 1 << 20;
  int max_samples = 256;
  int drain_timeout_seconds = 120;
  bool insecure = false;  // Needed to listen in plaintext beyond loopback.
  // PEM files, read again when they change. Empty: plaintext.
  std::string tls_cert;
  std::string tls_key;
  std::string tls_client_ca;  // Not empty: clients need a certificate, too.
  // Lines of JSON (src/auth/token_file.h), read again when they change. Empty:
  // whoever reaches the port may do everything.
  std::string auth_tokens_file;
  // With tokens; 0: no limit.
  int max_calls_per_tenant = 0;
  int64_t max_tokens_per_second_per_tenant = 0;
  LogStyle log_style = LogStyle::kAuto;
  LogLevel log_level = LogLevel::kInfo;

  // As EngineOptions::Validate. Also refuses a --listen beyond loopback without
  // TLS or --insecure, and tokens in plaintext but on 127.0.0.1, ::1 and
  // localhost.
  [[nodiscard]] absl::Status Validate() const;
};

// Splits "HOST:PORT" or "[V6]:PORT". INVALID_ARGUMENT naming `flag` when the
// host is empty or the port is not a number in [0, 65535].
struct HostPort {
  std::string host;  // Without brackets.
  int port = 0;
};
[[nodiscard]] absl::StatusOr<HostPort> ParseHostPort(absl::string_view flag,
                                                     absl::string_view address);

// True for 127.0.0.0/8, ::1 and "localhost".
[[nodiscard]] bool IsLoopback(absl::string_view host);

}  // namespace weft

#endif  // WEFT_SRC_CONFIG_OPTIONS_H_
