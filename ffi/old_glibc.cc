// Linked into _ffi alone, so that a module built on a new Linux loads on an old one.
//
// glibc gives a function a new version when it moves from libpthread, libdl or librt into libc,
// which most did in 2.34. The linker takes the newest version of its own machine, and older
// machines then refuse the module. Names that are defined here are found before those of glibc, and
// ask for an old version, which every glibc still has. A name that is missing here costs no more
// than a newer manylinux tag: `auditwheel show` says so, and `objdump -T` names it.
#if defined(__linux__) && defined(__x86_64__)
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// Jumps to an old version. Each jump has a section of its own, which the linker drops if nobody
// calls it.
#define JAX_EP_OLDEST(name, version)                                            \
  asm(".symver oldest_" #name ", " #name "@GLIBC_" #version                     \
      "\n"                                                                      \
      ".pushsection .text." #name                                               \
      ", \"ax\", @progbits\n"                                                   \
      ".globl " #name "\n.hidden " #name "\n.type " #name ", @function\n" #name \
      ":\n"                                                                     \
      "jmp *oldest_" #name "@GOTPCREL(%rip)\n.popsection")

JAX_EP_OLDEST(dladdr, 2.2.5);
JAX_EP_OLDEST(dlclose, 2.2.5);
JAX_EP_OLDEST(dlerror, 2.2.5);
JAX_EP_OLDEST(dlmopen, 2.3.4);
JAX_EP_OLDEST(dlopen, 2.2.5);
JAX_EP_OLDEST(dlsym, 2.2.5);
JAX_EP_OLDEST(dlvsym, 2.2.5);
JAX_EP_OLDEST(pow, 2.2.5);
JAX_EP_OLDEST(pthread_condattr_setpshared, 2.2.5);
JAX_EP_OLDEST(pthread_create, 2.2.5);
JAX_EP_OLDEST(pthread_detach, 2.2.5);
JAX_EP_OLDEST(pthread_getspecific, 2.2.5);
JAX_EP_OLDEST(pthread_join, 2.2.5);
JAX_EP_OLDEST(pthread_key_create, 2.2.5);
JAX_EP_OLDEST(pthread_key_delete, 2.2.5);
JAX_EP_OLDEST(pthread_kill, 2.2.5);
JAX_EP_OLDEST(pthread_mutex_trylock, 2.2.5);
JAX_EP_OLDEST(pthread_mutexattr_destroy, 2.2.5);
JAX_EP_OLDEST(pthread_mutexattr_init, 2.2.5);
JAX_EP_OLDEST(pthread_mutexattr_setpshared, 2.2.5);
JAX_EP_OLDEST(pthread_mutexattr_settype, 2.2.5);
JAX_EP_OLDEST(pthread_once, 2.2.5);
JAX_EP_OLDEST(pthread_rwlock_destroy, 2.2.5);
JAX_EP_OLDEST(pthread_rwlock_init, 2.2.5);
JAX_EP_OLDEST(pthread_rwlock_rdlock, 2.2.5);
JAX_EP_OLDEST(pthread_rwlock_timedrdlock, 2.2.5);
JAX_EP_OLDEST(pthread_rwlock_timedwrlock, 2.2.5);
JAX_EP_OLDEST(pthread_rwlock_tryrdlock, 2.2.5);
JAX_EP_OLDEST(pthread_rwlock_trywrlock, 2.2.5);
JAX_EP_OLDEST(pthread_rwlock_unlock, 2.2.5);
JAX_EP_OLDEST(pthread_rwlock_wrlock, 2.2.5);
JAX_EP_OLDEST(pthread_rwlockattr_destroy, 2.2.5);
JAX_EP_OLDEST(pthread_rwlockattr_init, 2.2.5);
JAX_EP_OLDEST(pthread_rwlockattr_setpshared, 2.2.5);
JAX_EP_OLDEST(pthread_setspecific, 2.2.5);
JAX_EP_OLDEST(pthread_spin_destroy, 2.2.5);
JAX_EP_OLDEST(pthread_spin_init, 2.2.5);
JAX_EP_OLDEST(pthread_spin_lock, 2.2.5);
JAX_EP_OLDEST(pthread_spin_trylock, 2.2.5);
JAX_EP_OLDEST(pthread_spin_unlock, 2.2.5);
JAX_EP_OLDEST(sem_destroy, 2.2.5);
JAX_EP_OLDEST(sem_init, 2.2.5);
JAX_EP_OLDEST(sem_post, 2.2.5);
JAX_EP_OLDEST(sem_timedwait, 2.2.5);
JAX_EP_OLDEST(sem_trywait, 2.2.5);
JAX_EP_OLDEST(sem_wait, 2.2.5);
JAX_EP_OLDEST(shm_open, 2.2.5);
JAX_EP_OLDEST(shm_unlink, 2.2.5);

extern "C" {

// libstdc++ then counts references atomically, as it does in every process with threads.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

// Since 2.36. libstdc++ draws the seeds of std::random_device by it.
__attribute__((visibility("hidden"))) unsigned arc4random() {
  unsigned number;
  if (getentropy(&number, sizeof(number)) != 0) abort();
  return number;
}

// A function since 2.33; before, a macro around another one.
__attribute__((visibility("hidden"))) int fstat64(int file, struct stat64* status) {
  return static_cast<int>(syscall(SYS_fstat, file, status));
}

// Since 2.30. Before that libstdc++ itself waits by the system's clock.
__attribute__((visibility("hidden"))) int pthread_cond_clockwait(pthread_cond_t* condition,
                                                                 pthread_mutex_t* mutex,
                                                                 clockid_t clock,
                                                                 const timespec* deadline) {
  using Wait = decltype(&pthread_cond_clockwait);
  static const Wait wait = reinterpret_cast<Wait>(dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"));
  if (wait != nullptr) return wait(condition, mutex, clock, deadline);
  constexpr long long kSecond = 1'000'000'000;
  timespec now, system_now;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &system_now);
  const long long nanoseconds = (system_now.tv_sec + deadline->tv_sec - now.tv_sec) * kSecond +
                                system_now.tv_nsec + deadline->tv_nsec - now.tv_nsec;
  const timespec system_deadline = {nanoseconds / kSecond, nanoseconds % kSecond};
  return pthread_cond_timedwait(condition, mutex, &system_deadline);
}

}  // extern "C"
#endif
