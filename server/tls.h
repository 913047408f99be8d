// Credentials of the gRPC server for TLS or mutual TLS, from files that may
// change while the server runs.
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
#include "src/metrics/metrics.h"

namespace weft {

// The files of --tls-cert, --tls-key and --tls-client-ca, in PEM.
struct TlsFiles {
  std::string certificates;  // The server's certificate, then its issuers'.
  std::string key;           // The private key, without a passphrase.
  std::string client_ca;     // Empty: clients need no certificate.
};

// Returns FAILED_PRECONDITION, which names the flag, if a file holds no
// certificate or no key, if the key belongs to another certificate, or if the
// server's certificate is not valid now. client_ca may be empty.
[[nodiscard]] absl::Status CheckTlsFiles(const TlsFiles& files);

// Reads the files again when they change. New connections use the new files;
// open connections stay. If the new files cannot be read or do not pass
// CheckTlsFiles, logs the error and keeps the last good files. So a key and its
// certificate may be replaced in any order.
class TlsRotation {
 public:
  // `registry`, which outlives this object, gets the expiry of the certificate
  // in use. Errors: those of CheckTlsFiles and ReadOperatorFile;
  // FAILED_PRECONDITION if a file is empty; those of ErrnoStatus if a file in
  // memory cannot be made.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<TlsRotation>> Start(
      const ServerOptions& options, prometheus::Registry* registry);

  // Returns credentials for mutual TLS if --tls-client-ca is set, otherwise for
  // TLS.
  [[nodiscard]] std::shared_ptr<grpc::ServerCredentials> MakeCredentials()
      const;

 private:
  TlsRotation(const ServerOptions& options, prometheus::Registry* registry);

  [[nodiscard]] absl::StatusOr<TlsFiles> Read() const;
  // Makes gRPC use `files`, which have passed CheckTlsFiles.
  [[nodiscard]] absl::Status Publish(const TlsFiles& files);
  void Reload();

  const ServerOptions options_;
  prometheus::Gauge& expiry_;
  TlsFiles current_;  // After Start, only the poller's thread uses this member.
  // The files that gRPC reads: the key with its certificates, and the CA
  // certificates for clients. The files are in memory, so that no copy of the
  // key reaches a disk.
  UniqueFd identity_;
  UniqueFd client_ca_;
  // Declared last, so that its thread ends before the other members are
  // destroyed.
  std::unique_ptr<FilePoller> poller_;
};

}  // namespace weft

#endif  // WEFT_SERVER_TLS_H_
