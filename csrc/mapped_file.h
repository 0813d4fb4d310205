// A file mapped into memory that can still be read after it was truncated, and detection of changes to the file.

#pragma once

#include <fcntl.h>
#include <pybind11/numpy.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/magic.h>
#include <sys/vfs.h>
#endif

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <utility>

#if defined(__APPLE__)
#define st_mtim st_mtimespec
#define st_ctim st_ctimespec
#endif

// The mappings of this process, for the SIGBUS handler.
//
// The kernel sends this signal to a thread that reads a mapped page that its file no longer has, or that the disk
// cannot read. The handler maps zeros over the whole mapping, marks it as lost and lets the thread continue. Users of
// the mapping check the mark after reading. Any other SIGBUS is passed to the previous handler.
class MappedRanges {
 public:
  struct Range {
    std::atomic<char*> begin{nullptr};  // null where the entry is free
    std::atomic<std::size_t> size{0};
    std::atomic<int> protection{0};
    std::atomic<bool> is_lost{false};
    Range* next{nullptr};
  };

  // Entries are reused and never freed, so that the handler can walk them at any time.
  static Range* add(char* begin, std::size_t size, int protection) {
    const std::lock_guard<std::mutex> lock(mutex());
    install_handler();
    Range* range = first().load();
    while (range != nullptr && range->begin.load() != nullptr) range = range->next;
    if (range == nullptr) {
      range = new Range;
      range->next = first().load();
      first().store(range);
    }
    range->is_lost = false;
    range->protection = protection;
    range->size = size;
    range->begin = begin;
    return range;
  }

  // Number of mappings that became lost so far.
  static inline std::atomic<std::int64_t> num_lost{0};

  static void remove(Range* range) { range->begin = nullptr; }

 private:
  static std::mutex& mutex() {
    static std::mutex instance;
    return instance;
  }

  static std::atomic<Range*>& first() {
    static std::atomic<Range*> instance{nullptr};
    return instance;
  }

  static struct sigaction& previous_action() {
    static struct sigaction instance {};
    return instance;
  }

  static void install_handler() {
    static bool is_installed = false;
    if (is_installed) return;
    is_installed = true;
    previous_action();  // initialized here, not in the handler
    struct sigaction action {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &previous_action());
  }

  static void on_bus_error(int, siginfo_t* info, void*) {
    const int saved_errno = errno;
    const bool is_fault = info->si_code > 0;  // a memory access caused it, not a process
    const char* address = static_cast<const char*>(info->si_addr);
    for (Range* range = is_fault ? first().load() : nullptr; range != nullptr; range = range->next) {
      char* begin = range->begin.load();
      const std::size_t size = range->size.load();
      if (begin == nullptr || address < begin || address >= begin + size) continue;
      range->is_lost = true;
      num_lost.fetch_add(1);
      const void* zeros =
          mmap(begin, size, range->protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
      if (zeros == MAP_FAILED) break;
      errno = saved_errno;
      return;  // the access is repeated and reads zero
    }
    sigaction(SIGBUS, &previous_action(), nullptr);  // it gets the signal when the access is repeated
    if (!is_fault) raise(SIGBUS);
    errno = saved_errno;
  }
};

// What happened to a mapped file since it was opened.
enum class FileChange {
  kNone,
  kLost,       // it became shorter or unreadable: a part may have been read as zeros
  kLonger,
  kModified,   // it was written to, or touched
  kRewritten,  // it was written to, and its modification time was set back
};

class MappedFile {
 public:
  // Maps a whole regular file. Its content may only change meanwhile if is_shared. Throws OSError.
  MappedFile(std::string path, bool writable, bool is_shared)
      : path_(std::move(path)), is_writable_(writable), is_shared_(is_shared) {
    if (const int error = map(writable); error != 0) throw_os_error(error);
  }

  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  ~MappedFile() {
    if (range_ == nullptr) return;
    MappedRanges::remove(range_);
    munmap(data_, size_);
  }

  char* data() const { return data_; }
  std::size_t size() const { return size_; }
  bool is_writable() const { return is_writable_; }

  // Removes all pages from this process; they stay in the page cache, and reading maps them again.
  void release() {
    if (range_ != nullptr) madvise(data_, size_, MADV_DONTNEED);
  }

  // Tells the system to read no pages beside those that are read: some systems read megabytes of them for each.
  void read_randomly() {
    if (range_ != nullptr) madvise(data_, size_, MADV_RANDOM);
  }

  // Returns what happened to the file since it was opened: reads may have returned other data. The file's status is
  // read unless this was done at most max_age_ms ago. An NFS client may cache a status for a minute. With asks_server,
  // the file is opened, for which the client asks the server.
  FileChange change(std::int64_t max_age_ms, bool asks_server) {
    if (range_ != nullptr && range_->is_lost.load()) return FileChange::kLost;
    const std::int64_t now = std::chrono::duration_cast<std::chrono::milliseconds>(
                                 std::chrono::steady_clock::now().time_since_epoch())
                                 .count();
    if (now - status_seen_at_.load() < max_age_ms) return FileChange::kNone;
    if (asks_server && is_on_nfs_) {
      const int descriptor = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
      if (descriptor >= 0) close(descriptor);
    }
    struct stat status {};
    const FileChange found = stat(path_.c_str(), &status) == 0 ? change_to(status) : FileChange::kNone;
    if (found == FileChange::kNone) status_seen_at_ = now;
    return found;
  }

 private:
  // Compares the file's status with its status when it was opened.
  FileChange change_to(const struct stat& status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    struct stat& opened = status_;
    // A file that replaced this one under its name is another file; this one is unchanged.
    if (status.st_dev != opened.st_dev || status.st_ino != opened.st_ino) return FileChange::kNone;
    if (status.st_size < opened.st_size) return FileChange::kLost;
    if (is_shared_) return FileChange::kNone;
    if (status.st_size > opened.st_size) return FileChange::kLonger;
    if (!is_equal(status.st_mtim, opened.st_mtim)) return FileChange::kModified;
    if (is_equal(status.st_ctim, opened.st_ctim)) return FileChange::kNone;
    // chmod, chown and a hard link also set this time, without changing the content.
    const bool is_explained = status.st_mode != opened.st_mode || status.st_uid != opened.st_uid ||
                              status.st_gid != opened.st_gid || status.st_nlink != opened.st_nlink;
    if (!is_explained) return FileChange::kRewritten;
    opened = status;
    return FileChange::kNone;
  }

  static bool is_equal(const struct timespec& a, const struct timespec& b) {
    return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
  }

  // Maps the file without the GIL: a file system may take minutes to answer. Returns an error number, or 0.
  int map(bool writable) {
    const pybind11::gil_scoped_release release;
    // Without O_NONBLOCK, opening a fifo would wait for a writer.
    const int descriptor = open(path_.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0) return errno;
    int error = fstat(descriptor, &status_) == 0 ? 0 : errno;
#if defined(__linux__)
    struct statfs file_system {};
    is_on_nfs_ = fstatfs(descriptor, &file_system) == 0 && file_system.f_type == NFS_SUPER_MAGIC;
#endif
    if (error == 0 && !S_ISREG(status_.st_mode)) error = S_ISDIR(status_.st_mode) ? EISDIR : ENODEV;
    if (error == 0 && status_.st_size > 0) {  // an empty file cannot be mapped
      const int protection = PROT_READ | (writable ? PROT_WRITE : 0);
      size_ = static_cast<std::size_t>(status_.st_size);
      void* memory = mmap(nullptr, size_, protection, MAP_SHARED, descriptor, 0);
      error = memory == MAP_FAILED ? errno : 0;
      if (error == 0) {
        data_ = static_cast<char*>(memory);
        range_ = MappedRanges::add(data_, size_, protection);
      }
    }
    close(descriptor);  // a blend of thousands of corpora would use up the process's descriptors
    return error;
  }

  [[noreturn]] void throw_os_error(int error) const {
    errno = error;
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, path_.c_str());
    throw pybind11::error_already_set();
  }

  std::string path_;
  bool is_writable_;
  bool is_shared_;
  bool is_on_nfs_{false};
  char* data_{nullptr};
  std::size_t size_{0};
  MappedRanges::Range* range_{nullptr};
  std::mutex mutex_;
  struct stat status_ {};  // status at opening; times, mode, owner and links may be newer
  std::atomic<std::int64_t> status_seen_at_{std::numeric_limits<std::int64_t>::min() / 2};  // milliseconds
};
