#include "server/tls.h"

#include <fcntl.h>
#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"
#include "src/base/log.h"
#include "src/base/status_macros.h"
#include "src/files/file_io.h"
#include "src/files/operator_file.h"

namespace weft {
namespace {

constexpr unsigned kRefreshSeconds = 1;

template <typename T, void (*Free)(T*)>
struct Freeer {
  void operator()(T* object) const { Free(object); }
};
using Bio = std::unique_ptr<BIO, Freeer<BIO, BIO_free_all>>;
using Certificate = std::unique_ptr<X509, Freeer<X509, X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Freeer<EVP_PKEY, EVP_PKEY_free>>;

Bio Open(const std::string& pem) {
  return Bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

// Returns the file's first certificate, or null.
Certificate ReadCertificate(const std::string& pem) {
  return Certificate(
      PEM_read_bio_X509(Open(pem).get(), nullptr, nullptr, nullptr));
}

// Without this callback OpenSSL would ask for a passphrase on the terminal.
int NoPassphrase(char*, int, int, void*) { return 0; }

absl::Status Bad(absl::string_view flag, absl::string_view problem) {
  return absl::FailedPreconditionError(absl::StrCat(flag, ": ", problem));
}

// Returns the time after which the certificate is not valid.
absl::StatusOr<absl::Time> ExpiryOf(absl::string_view flag,
                                    const X509* certificate) {
  tm expiry{};
  if (ASN1_TIME_to_tm(X509_get0_notAfter(certificate), &expiry) != 1) {
    return Bad(flag, "the certificate's date of expiry is malformed");
  }
  return absl::FromTM(expiry, absl::UTCTimeZone());
}

absl::Status CheckDates(absl::string_view flag, const X509* certificate) {
  if (X509_cmp_current_time(X509_get0_notBefore(certificate)) > 0) {
    return Bad(flag, "the certificate is not valid yet");
  }
  WEFT_ASSIGN_OR_RETURN(const absl::Time expiry, ExpiryOf(flag, certificate));
  if (expiry < absl::Now()) return Bad(flag, "the certificate has expired");
  return absl::OkStatus();
}

// Creates a nameless file in memory. This process opens it by the path of its
// descriptor (PathOf).
absl::StatusOr<UniqueFd> MemoryFile(const std::string& contents) {
  UniqueFd fd(memfd_create("weft-tls", MFD_CLOEXEC));
  if (fd.get() < 0) return ErrnoStatus(errno, "making a file in memory");
  for (size_t done = 0; done < contents.size();) {
    const ssize_t count =
        write(fd.get(), contents.data() + done, contents.size() - done);
    if (count < 0) return ErrnoStatus(errno, "writing a file in memory");
    done += static_cast<size_t>(count);
  }
  return fd;
}

std::string PathOf(const UniqueFd& fd) {
  return fd.get() < 0 ? "" : absl::StrCat("/proc/self/fd/", fd.get());
}

// Replaces the file behind `fd` atomically: whoever opens PathOf(*fd) gets the
// old or the new file.
absl::Status Replace(const std::string& contents, UniqueFd* fd) {
  WEFT_ASSIGN_OR_RETURN(UniqueFd fresh, MemoryFile(contents));
  if (fd->get() < 0) {
    *fd = std::move(fresh);
  } else if (dup3(fresh.get(), fd->get(), O_CLOEXEC) < 0) {
    return ErrnoStatus(errno, "replacing a file in memory");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckTlsFiles(const TlsFiles& files) {
  const Certificate certificate = ReadCertificate(files.certificates);
  if (certificate == nullptr) {
    return Bad("--tls-cert", "the file holds no certificate in PEM");
  }
  const Key key(PEM_read_bio_PrivateKey(Open(files.key).get(), nullptr,
                                        NoPassphrase, nullptr));
  if (key == nullptr) {
    return Bad("--tls-key",
               "the file holds no private key in PEM without a passphrase");
  }
  if (X509_check_private_key(certificate.get(), key.get()) != 1) {
    return Bad("--tls-key", "the key is not that of --tls-cert");
  }
  WEFT_RETURN_IF_ERROR(CheckDates("--tls-cert", certificate.get()));
  if (files.client_ca.empty()) return absl::OkStatus();
  if (ReadCertificate(files.client_ca) == nullptr) {
    return Bad("--tls-client-ca", "the file holds no certificate in PEM");
  }
  return absl::OkStatus();
}

TlsRotation::TlsRotation(const ServerOptions& options,
                         prometheus::Registry* registry)
    : options_(options),
      expiry_(AddGauge(
          registry, "weft_tls_certificate_expiry_timestamp_seconds",
          "Unix time after which the certificate in use is not valid.")) {}

absl::StatusOr<std::unique_ptr<TlsRotation>> TlsRotation::Start(
    const ServerOptions& options, prometheus::Registry* registry) {
  std::unique_ptr<TlsRotation> rotation(new TlsRotation(options, registry));
  WEFT_ASSIGN_OR_RETURN(rotation->current_, rotation->Read());
  WEFT_RETURN_IF_ERROR(CheckTlsFiles(rotation->current_));
  WEFT_RETURN_IF_ERROR(rotation->Publish(rotation->current_));
  std::vector<std::string> paths = {options.tls_cert, options.tls_key};
  if (!options.tls_client_ca.empty()) paths.push_back(options.tls_client_ca);
  rotation->poller_ = std::make_unique<FilePoller>(
      std::move(paths), [raw = rotation.get()] { raw->Reload(); });
  return rotation;
}

absl::StatusOr<TlsFiles> TlsRotation::Read() const {
  TlsFiles files;
  const struct {
    const char* flag;
    const std::string& path;
    std::string* contents;
  } all[] = {
      {"--tls-cert", options_.tls_cert, &files.certificates},
      {"--tls-key", options_.tls_key, &files.key},
      {"--tls-client-ca", options_.tls_client_ca, &files.client_ca},
  };
  for (const auto& file : all) {
    if (file.path.empty()) continue;
    absl::StatusOr<std::string> contents = ReadOperatorFile(file.path);
    if (!contents.ok()) {
      return absl::Status(
          contents.status().code(),
          absl::StrCat(file.flag, ": ", contents.status().message()));
    }
    *file.contents = *std::move(contents);
    // An empty --tls-client-ca file must not mean that clients need no
    // certificate.
    if (file.contents->empty()) return Bad(file.flag, "the file is empty");
  }
  return files;
}

absl::Status TlsRotation::Publish(const TlsFiles& files) {
  WEFT_ASSIGN_OR_RETURN(
      const absl::Time expiry,
      ExpiryOf("--tls-cert", ReadCertificate(files.certificates).get()));
  // One file holds the key and its certificates, so that both change at once.
  WEFT_RETURN_IF_ERROR(
      Replace(absl::StrCat(files.key, "\n", files.certificates), &identity_));
  expiry_.Set(static_cast<double>(absl::ToUnixSeconds(expiry)));
  if (files.client_ca.empty()) return absl::OkStatus();
  return Replace(files.client_ca, &client_ca_);
}

void TlsRotation::Reload() {
  const absl::StatusOr<TlsFiles> files = Read();
  absl::Status status = files.status();
  if (status.ok() && files->certificates == current_.certificates &&
      files->key == current_.key && files->client_ca == current_.client_ca) {
    return;
  }
  if (status.ok()) status = CheckTlsFiles(*files);
  if (status.ok()) status = Publish(*files);
  if (!status.ok()) {
    Log(LogLevel::kError, "new TLS files are bad; the old ones stay in use",
        {{"error", std::string(status.message())}});
    return;
  }
  current_ = *files;
  Log(LogLevel::kInfo, "TLS files have been replaced");
}

std::shared_ptr<grpc::ServerCredentials> TlsRotation::MakeCredentials() const {
  const std::string identity = PathOf(identity_);
  const auto provider =
      std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
          identity, identity, PathOf(client_ca_), kRefreshSeconds);
  grpc::experimental::TlsServerCredentialsOptions options(provider);
  options.watch_identity_key_cert_pairs();
  if (client_ca_.get() >= 0) {
    options.watch_root_certs();
    options.set_cert_request_type(
        GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return grpc::experimental::TlsServerCredentials(options);
}

}  // namespace weft
