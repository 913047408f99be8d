// The server's side of a connection: plaintext, local, TLS or mutual TLS.
#ifndef WEFT_SERVER_TLS_H_
#define WEFT_SERVER_TLS_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "grpcpp/security/server_credentials.h"
#include "server/file_poller.h"
#include "src/base/mutex.h"
#include "src/config/options.h"
#include "src/files/file_io.h"

namespace weft {

// The files of --tls-cert, --tls-key and --tls-client-ca, in PEM.
struct TlsFiles {
  std::string certificates;  // The server's, then those that signed it.
  std::string key;           // Without a passphrase.
  std::string client_ca;     // Empty: clients need no certificate.
};

// FAILED_PRECONDITION naming the flag when a file holds no certificate or no
// key, the key is of another certificate, or the certificate is out of date.
[[nodiscard]] absl::Status CheckTlsFiles(const TlsFiles& files);

// Follows the files while the server runs. New ones count from the next
// connection on; open connections stay. Files that do not pass CheckTlsFiles
// are logged and the last good ones stay, so it is no matter in which order a
// key and its certificate are replaced.
class TlsRotation {
 public:
  // Errors: those of CheckTlsFiles; NOT_FOUND and INTERNAL naming the flag.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<TlsRotation>> Start(
      const ServerOptions& options);

  // Mutual TLS where --tls-client-ca is given.
  [[nodiscard]] std::shared_ptr<grpc::ServerCredentials> MakeCredentials()
      const;

 private:
  explicit TlsRotation(const ServerOptions& options) : options_(options) {}

  [[nodiscard]] absl::StatusOr<TlsFiles> Read() const;
  // Shows the files to gRPC.
  [[nodiscard]] absl::Status Publish(const TlsFiles& files);
  void Reload();

  const ServerOptions options_;
  TlsFiles current_;  // The poller's thread, after Start.
  // What gRPC reads: files in memory, so that it never meets a key without its
  // certificate, and no copy of the key reaches a disk.
  UniqueFd identity_;
  UniqueFd client_ca_;
  // Declared last: it stops first.
  std::unique_ptr<FilePoller> poller_;
};

}  // namespace weft

#endif  // WEFT_SERVER_TLS_H_
