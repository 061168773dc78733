// What lets an extension that g++ 12 compiled on glibc 2.36 load where glibc is 2.28 and libstdc++ that of g++ 8, on
// x86-64 and aarch64: manylinux_2_28, as torch's own wheels. For wheels only, and for the extension alone: all of it is
// hidden.
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <new>

#define DDP_LAB_OURS __attribute__((visibility("hidden")))
// `older` is what that version of the symbol is called here. The newer one differs in its name and place alone.
#if defined(__aarch64__)
#define DDP_LAB_OLDER(older, symbol, x86, aarch64) __asm__(".symver " #older "," #symbol "@" #aarch64)
#else
#define DDP_LAB_OLDER(older, symbol, x86, aarch64) __asm__(".symver " #older "," #symbol "@" #x86)
#endif

extern "C" {

DDP_LAB_OLDER(older_trylock, pthread_mutex_trylock, GLIBC_2.2.5, GLIBC_2.17);
int older_trylock(pthread_mutex_t* mutex);
DDP_LAB_OURS int pthread_mutex_trylock(pthread_mutex_t* mutex) noexcept { return older_trylock(mutex); }

DDP_LAB_OLDER(older_once, pthread_once, GLIBC_2.2.5, GLIBC_2.17);
int older_once(pthread_once_t* once, void (*function)());
DDP_LAB_OURS int pthread_once(pthread_once_t* once, void (*function)()) { return older_once(once, function); }

DDP_LAB_OLDER(older_setname, pthread_setname_np, GLIBC_2.12, GLIBC_2.17);
int older_setname(pthread_t thread, const char* name);
DDP_LAB_OURS int pthread_setname_np(pthread_t thread, const char* name) noexcept { return older_setname(thread, name); }

// In librt then, which is linked for that.
DDP_LAB_OLDER(older_shm_open, shm_open, GLIBC_2.2.5, GLIBC_2.17);
int older_shm_open(const char* name, int flags, mode_t mode);
DDP_LAB_OURS int shm_open(const char* name, int flags, mode_t mode) { return older_shm_open(name, flags, mode); }

DDP_LAB_OLDER(older_shm_unlink, shm_unlink, GLIBC_2.2.5, GLIBC_2.17);
int older_shm_unlink(const char* name);
DDP_LAB_OURS int shm_unlink(const char* name) { return older_shm_unlink(name); }

// std::condition_variable::wait(std::unique_lock<std::mutex>&)
DDP_LAB_OLDER(older_wait, _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, GLIBCXX_3.4.11, GLIBCXX_3.4.11);
void older_wait(void* condition, void* lock);
DDP_LAB_OURS void _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE(void* condition, void* lock) {
  older_wait(condition, lock);
}

// What follows was not there at all.

// Of glibc 2.30. A wait that a change of the system's clock makes longer or shorter, as in the libstdc++ of g++ 8: who
// waits looks at its own clock afterwards.
DDP_LAB_OURS int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                        const struct timespec* until) {
  constexpr long kSecond = 1'000'000'000;
  struct timespec now, wall;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &wall);
  wall.tv_sec += until->tv_sec - now.tv_sec;
  wall.tv_nsec += until->tv_nsec - now.tv_nsec;
  if (wall.tv_nsec < 0) {
    wall.tv_nsec += kSecond;
    --wall.tv_sec;
  } else if (wall.tv_nsec >= kSecond) {
    wall.tv_nsec -= kSecond;
    ++wall.tv_sec;
  }
  return pthread_cond_timedwait(condition, mutex, &wall);
}

// std::exception_ptr's counter, which only its own members could reach: copying adds one, destroying takes one away.
void _ZNSt15__exception_ptr13exception_ptrC1ERKS0_(void* copy, const void* pointer);
void _ZNSt15__exception_ptr13exception_ptrD1Ev(void* pointer);
DDP_LAB_OURS void _ZNSt15__exception_ptr13exception_ptr9_M_addrefEv(void* pointer) {
  void* copy = nullptr;  // never destroyed
  _ZNSt15__exception_ptr13exception_ptrC1ERKS0_(&copy, pointer);
}
DDP_LAB_OURS void _ZNSt15__exception_ptr13exception_ptr10_M_releaseEv(void* pointer) {
  _ZNSt15__exception_ptr13exception_ptrD1Ev(pointer);
}

// Of glibc 2.32: whether shared pointers may count without atomic operations. Never.
DDP_LAB_OURS char __libc_single_threaded = 0;

// Of glibc 2.33.
DDP_LAB_OURS int fstat(int descriptor, struct stat* found) noexcept {
  return static_cast<int>(syscall(SYS_fstat, descriptor, found));
}
}

namespace std {

DDP_LAB_OURS void __throw_bad_array_new_length() { throw bad_array_new_length(); }

}  // namespace std
