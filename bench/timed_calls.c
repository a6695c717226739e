/* Stands in for the CUDA runtime and notes when each call of the replay loop began and ended.

   Built with -DREAL="file" and linked to that file, so that every function that is not here is found
   behind this library. What lies between the end of one call and the beginning of the next is not
   C: it is Python, ctypes and waiting for the interpreter lock.

   With device times, a timing event is recorded before and after each launch as well. The first
   call of a thread allocates; leave the first steps out. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LAUNCH, RECORD, SYNCHRONIZE, WAIT, KINDS };
enum { THREADS = 64 };

typedef struct {
  int64_t kind, begun_ns, ended_ns, handle;
} Note;

typedef struct {
  Note *notes;
  void **events; /* two for each launch */
  int64_t count, launches;
} Log;

typedef int (*Two)(void *, void *);
typedef int (*One)(void *);
typedef int (*Three)(void *, void *, unsigned);
typedef int (*Create)(void **, unsigned);
typedef int (*Elapsed)(float *, void *, void *);

static Two real_launch, real_record;
static One real_synchronize, real_destroy;
static Three real_wait;
static Create real_create;
static Elapsed real_elapsed;
static Log logs[THREADS];
static int64_t capacity, timed_launches, epoch, threads;
static __thread Log *mine;
static __thread int64_t my_epoch = -1;

__attribute__((constructor)) static void find(void) {
  void *real = dlopen(REAL, RTLD_NOW | RTLD_LOCAL);
  if (!real) abort();
  real_launch = (Two)dlsym(real, "cudaGraphLaunch");
  real_record = (Two)dlsym(real, "cudaEventRecord");
  real_synchronize = (One)dlsym(real, "cudaEventSynchronize");
  real_destroy = (One)dlsym(real, "cudaEventDestroy");
  real_wait = (Three)dlsym(real, "cudaStreamWaitEvent");
  real_create = (Create)dlsym(real, "cudaEventCreateWithFlags");
  real_elapsed = (Elapsed)dlsym(real, "cudaEventElapsedTime");
}

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* Begin anew: at most `notes` calls of each thread are kept, and the device's times of at most
   `launches` launches. 0 notes stops. */
void timed_start(int64_t notes, int64_t launches) {
  capacity = notes;
  if (!notes) return;
  timed_launches = launches;
  __atomic_store_n(&threads, 0, __ATOMIC_SEQ_CST);
  __atomic_add_fetch(&epoch, 1, __ATOMIC_SEQ_CST);
}

static Log *log_of_thread(void) {
  if (my_epoch == epoch) return mine;
  my_epoch = epoch;
  int64_t index = __atomic_fetch_add(&threads, 1, __ATOMIC_SEQ_CST);
  mine = index < THREADS ? &logs[index] : NULL;
  if (!mine) return NULL;
  free(mine->notes);
  mine->notes = malloc(capacity * sizeof(Note));
  memset(mine->notes, 0, capacity * sizeof(Note)); /* no page is touched first in the loop */
  mine->count = mine->launches = 0;
  mine->events = NULL;
  if (timed_launches) {
    mine->events = calloc(2 * timed_launches, sizeof(void *));
    for (int64_t i = 0; i < 2 * timed_launches; i++)
      if (real_create(&mine->events[i], 0)) mine->events[i] = NULL;
  }
  return mine;
}

static void note(int64_t kind, void *handle, int64_t begun, int64_t ended) {
  Log *log = log_of_thread();
  if (!log || log->count >= capacity) return;
  log->notes[log->count++] = (Note){kind, begun, ended, (int64_t)(intptr_t)handle};
}

int cudaGraphLaunch(void *graph, void *stream) {
  if (!capacity) return real_launch(graph, stream);
  Log *log = log_of_thread();
  int events = log && log->events && log->launches < timed_launches;
  int64_t begun = now();
  if (events) real_record(log->events[2 * log->launches], stream);
  int64_t before = events ? now() : begun;
  int code = real_launch(graph, stream);
  int64_t after = now();
  if (events) real_record(log->events[2 * log->launches++ + 1], stream);
  /* the events' own time is C as well, but not the launch's: it is a record apart */
  if (events) note(RECORD, stream, begun, before);
  note(LAUNCH, graph, before, after);
  if (events) note(RECORD, stream, after, now());
  return code;
}

int cudaEventRecord(void *event, void *stream) {
  int64_t begun = now();
  int code = real_record(event, stream);
  if (capacity) note(RECORD, event, begun, now());
  return code;
}

int cudaEventSynchronize(void *event) {
  int64_t begun = now();
  int code = real_synchronize(event);
  if (capacity) note(SYNCHRONIZE, event, begun, now());
  return code;
}

int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
  int64_t begun = now();
  int code = real_wait(stream, event, flags);
  if (capacity) note(WAIT, event, begun, now());
  return code;
}

/* What thread number `index` noted, in order; 0 beyond the last thread. */
int64_t timed_notes(int64_t index, const Note **notes) {
  if (index >= THREADS || index >= __atomic_load_n(&threads, __ATOMIC_SEQ_CST)) return 0;
  *notes = logs[index].notes;
  return logs[index].count;
}

/* us on the device of each launch, and from its end to the beginning of the next. To be called
   when everything has finished; destroys the events. Returns the number of launches. */
int64_t timed_device(int64_t index, float *busy_us, float *gap_us) {
  if (index >= THREADS || !logs[index].events) return 0;
  Log *log = &logs[index];
  void **events = log->events;
  for (int64_t i = 0; i < log->launches; i++) {
    float ms = -1;
    if (real_elapsed(&ms, events[2 * i], events[2 * i + 1])) ms = -1;
    busy_us[i] = 1e3f * ms;
    ms = -1;
    if (i + 1 < log->launches && real_elapsed(&ms, events[2 * i + 1], events[2 * i + 2])) ms = -1;
    gap_us[i] = 1e3f * ms;
  }
  for (int64_t i = 0; i < 2 * timed_launches; i++)
    if (events[i]) real_destroy(events[i]);
  free(events);
  log->events = NULL;
  return log->launches;
}
