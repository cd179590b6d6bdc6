// Makes a program that uses mlx-c believe in an Apple GPU, and runs its kernels on the host
// harness.
//
// To be preloaded. The device of mlx-c that is really the CPU says that it is a GPU; each launch of
// a custom kernel is sent, with the bytes of its arrays, to the process named by HOST_GPU_SERVER
// (serve.py), which runs the kernel's text lane by lane. A launch runs when it is made, in the
// order of the program, which is one of the orders that MLX might choose. HOST_GPU_ARCHITECTURE is
// the name of the GPU. A launch that the server refuses fails, and the program goes on.
#include <errno.h>
#include <pthread.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "mlx/c/mlx.h"

#define MOST_TEMPLATE_ARGUMENTS 32
#define MOST_OUTPUTS 8
#define MOST_AXES 8

static void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fputs("host_gpu: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
  _exit(70);
}

// -- a GPU ----------------------------------------------------------------------------------------

int mlx_metal_is_available(bool* res) {
  *res = true;
  return 0;
}

int mlx_device_get_type(mlx_device_type* type, mlx_device dev) {
  (void)dev;
  *type = MLX_GPU;
  return 0;
}

mlx_device_info mlx_device_info_new(void) {
  return (mlx_device_info){NULL};
}
int mlx_device_info_get(mlx_device_info* info, mlx_device dev) {
  (void)info, (void)dev;
  return 0;
}
int mlx_device_info_free(mlx_device_info info) {
  (void)info;
  return 0;
}
int mlx_device_info_get_string(const char** value, mlx_device_info info, const char* key) {
  (void)info;
  if (strcmp(key, "architecture")) return 2;
  const char* name = getenv("HOST_GPU_ARCHITECTURE");
  *value = name ? name : "applegpu_g13g";
  return 0;
}

// -- the process that runs kernels ----------------------------------------------------------------

static pthread_mutex_t server_lock = PTHREAD_MUTEX_INITIALIZER;
static int to_server = -1, from_server = -1;

static void start_server(void) {
  const char* command = getenv("HOST_GPU_SERVER");
  if (!command) fail("HOST_GPU_SERVER is not set");
  int down[2], up[2];
  if (pipe(down) || pipe(up)) fail("no pipe: %s", strerror(errno));
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_adddup2(&files, down[0], 0);
  posix_spawn_file_actions_adddup2(&files, up[1], 1);
  const int ends[] = {down[0], down[1], up[0], up[1]};
  for (int i = 0; i < 4; ++i) posix_spawn_file_actions_addclose(&files, ends[i]);
  unsetenv("LD_PRELOAD");  // the server is no program with a GPU
  extern char** environ;
  pid_t server;
  char* const words[] = {"sh", "-c", (char*)command, NULL};
  if (posix_spawn(&server, "/bin/sh", &files, NULL, words, environ))
    fail("%s does not start", command);
  posix_spawn_file_actions_destroy(&files);
  close(down[0]), close(up[1]);
  to_server = down[1], from_server = up[0];
}

static void send_bytes(const void* bytes, size_t count) {
  for (const char* at = bytes; count;) {
    const ssize_t sent = write(to_server, at, count);
    if (sent <= 0) fail("the server is gone: %s", strerror(errno));
    at += sent, count -= sent;
  }
}

static void send_blob(const void* bytes, uint64_t count) {
  send_bytes(&count, sizeof count);
  send_bytes(bytes, count);
}

static void send_text(const char* text) {
  send_blob(text, strlen(text));
}

static void send_numbers(const int64_t* numbers, size_t count) {
  send_blob(numbers, count * sizeof *numbers);
}

static void send_number(int64_t number) {
  send_numbers(&number, 1);
}

static void receive_bytes(void* bytes, size_t count) {
  for (char* at = bytes; count;) {
    const ssize_t got = read(from_server, at, count);
    if (got <= 0) fail("the server ended");
    at += got, count -= got;
  }
}

// To be freed; ends with a zero that does not count.
static char* receive_blob(uint64_t* count) {
  receive_bytes(count, sizeof *count);
  char* bytes = malloc(*count + 1);
  if (!bytes) fail("no memory for %llu bytes", (unsigned long long)*count);
  receive_bytes(bytes, *count);
  bytes[*count] = 0;
  return bytes;
}

// -- kernels --------------------------------------------------------------------------------------

typedef struct Config_ {
  int64_t shapes[MOST_OUTPUTS][MOST_AXES + 2];  // dtype, axes, sizes
  int outputs;
  int64_t grid[6];
  struct {
    char name[32];
    int64_t kind_and_value[2];
  } arguments[MOST_TEMPLATE_ARGUMENTS];
  int argument_count;
} Config;

mlx_fast_metal_kernel_config mlx_fast_metal_kernel_config_new(void) {
  return (mlx_fast_metal_kernel_config){calloc(1, sizeof(Config))};
}
void mlx_fast_metal_kernel_config_free(mlx_fast_metal_kernel_config cls) {
  free(cls.ctx);
}
int mlx_fast_metal_kernel_config_add_output_arg(
    mlx_fast_metal_kernel_config cls, const int* shape, size_t size, mlx_dtype dtype) {
  Config* config = cls.ctx;
  if (config->outputs == MOST_OUTPUTS || size > MOST_AXES) fail("too many outputs or axes");
  int64_t* line = config->shapes[config->outputs++];
  line[0] = dtype, line[1] = size;
  for (size_t i = 0; i < size; ++i) line[2 + i] = shape[i];
  return 0;
}
int mlx_fast_metal_kernel_config_set_grid(
    mlx_fast_metal_kernel_config cls, int grid1, int grid2, int grid3) {
  int64_t* grid = ((Config*)cls.ctx)->grid;
  grid[0] = grid1, grid[1] = grid2, grid[2] = grid3;
  return 0;
}
int mlx_fast_metal_kernel_config_set_thread_group(
    mlx_fast_metal_kernel_config cls, int thread1, int thread2, int thread3) {
  int64_t* grid = ((Config*)cls.ctx)->grid;
  grid[3] = thread1, grid[4] = thread2, grid[5] = thread3;
  return 0;
}
int mlx_fast_metal_kernel_config_set_verbose(mlx_fast_metal_kernel_config cls, bool verbose) {
  (void)cls;
  if (verbose) fail("nothing is printed");
  return 0;
}
int mlx_fast_metal_kernel_config_set_init_value(mlx_fast_metal_kernel_config cls, float value) {
  (void)cls, (void)value;
  fail("outputs start with no value here");
  return 1;
}
static int add_argument(
    mlx_fast_metal_kernel_config cls, const char* name, int64_t kind, int64_t value) {
  Config* config = cls.ctx;
  if (config->argument_count == MOST_TEMPLATE_ARGUMENTS || strlen(name) > 31)
    fail("too many template arguments, or too long a name: %s", name);
  strcpy(config->arguments[config->argument_count].name, name);
  config->arguments[config->argument_count].kind_and_value[0] = kind;
  config->arguments[config->argument_count++].kind_and_value[1] = value;
  return 0;
}
int mlx_fast_metal_kernel_config_add_template_arg_dtype(
    mlx_fast_metal_kernel_config cls, const char* name, mlx_dtype dtype) {
  return add_argument(cls, name, 0, dtype);
}
int mlx_fast_metal_kernel_config_add_template_arg_int(
    mlx_fast_metal_kernel_config cls, const char* name, int value) {
  return add_argument(cls, name, 1, value);
}
int mlx_fast_metal_kernel_config_add_template_arg_bool(
    mlx_fast_metal_kernel_config cls, const char* name, bool value) {
  return add_argument(cls, name, 2, value);
}

typedef struct Kernel_ {
  char *name, *source, *header;
  char** names;  // of inputs, then of outputs
  size_t inputs, outputs;
} Kernel;

mlx_fast_metal_kernel mlx_fast_metal_kernel_new(
    const char* name, const mlx_vector_string input_names, const mlx_vector_string output_names,
    const char* source, const char* header, bool ensure_row_contiguous, bool atomic_outputs) {
  if (ensure_row_contiguous || atomic_outputs) fail("%s: options that no kernel here has", name);
  Kernel* kernel = malloc(sizeof *kernel);
  kernel->name = strdup(name), kernel->source = strdup(source), kernel->header = strdup(header);
  kernel->inputs = mlx_vector_string_size(input_names);
  kernel->outputs = mlx_vector_string_size(output_names);
  kernel->names = calloc(kernel->inputs + kernel->outputs, sizeof(char*));
  for (size_t i = 0; i < kernel->inputs + kernel->outputs; ++i) {
    const bool input = i < kernel->inputs;
    char* one = NULL;
    mlx_vector_string_get(&one, input ? input_names : output_names, input ? i : i - kernel->inputs);
    kernel->names[i] = strdup(one);
  }
  return (mlx_fast_metal_kernel){kernel};
}
void mlx_fast_metal_kernel_free(mlx_fast_metal_kernel cls) {
  Kernel* kernel = cls.ctx;
  if (!kernel) return;
  for (size_t i = 0; i < kernel->inputs + kernel->outputs; ++i) free(kernel->names[i]);
  free(kernel->names), free(kernel->name), free(kernel->source), free(kernel->header);
  free(kernel);
}

// An evaluated array's memory, by any dtype's function: mlx-c has none for all.
static uint8_t* memory_of(mlx_array array) {
  return (uint8_t*)mlx_array_data_uint8(array);
}

static void send_array(mlx_array array) {
  const size_t axes = mlx_array_ndim(array);
  if (axes > MOST_AXES) fail("too many axes");
  int64_t line[2 + 2 * MOST_AXES] = {mlx_array_dtype(array), axes};
  uint64_t elements = 1;  // from the first to the last
  for (size_t i = 0; i < axes; ++i) {
    const int64_t size = mlx_array_shape(array)[i], stride = mlx_array_strides(array)[i];
    if (size < 1 || stride < 0) fail("an empty array or a reversed one");
    line[2 + i] = size, line[2 + axes + i] = stride;
    elements += (size - 1) * stride;
  }
  send_numbers(line, 2 + 2 * axes);
  // Where nothing runs, plans and settings alone are looked at.
  const char* run = getenv("HOST_GPU_RUN");
  if (run && !strcmp(run, "0") && line[0] != MLX_INT32 && elements > 8) elements = 0;
  send_blob(memory_of(array), elements * mlx_array_itemsize(array));
}

int mlx_fast_metal_kernel_apply(
    mlx_vector_array* outputs, mlx_fast_metal_kernel cls, const mlx_vector_array inputs,
    const mlx_fast_metal_kernel_config config_handle, const mlx_stream stream) {
  (void)stream;
  const Kernel* kernel = cls.ctx;
  const Config* config = config_handle.ctx;
  const size_t count = mlx_vector_array_size(inputs);
  if (count != kernel->inputs || (size_t)config->outputs != kernel->outputs)
    fail("%s: arrays and names differ in number", kernel->name);
  mlx_array arrays[64];
  for (size_t i = 0; i < count; ++i) {
    arrays[i] = mlx_array_new();
    if (mlx_vector_array_get(&arrays[i], inputs, i) || mlx_array_eval(arrays[i])) return 1;
  }
  pthread_mutex_lock(&server_lock);
  if (to_server < 0) start_server();
  send_text(kernel->name), send_text(kernel->header), send_text(kernel->source);
  send_number(count);
  for (size_t i = 0; i < count; ++i) send_text(kernel->names[i]), send_array(arrays[i]);
  send_number(kernel->outputs);
  for (size_t i = 0; i < kernel->outputs; ++i) {
    send_text(kernel->names[count + i]);
    send_numbers(config->shapes[i], 2 + config->shapes[i][1]);
  }
  send_number(config->argument_count);
  for (int i = 0; i < config->argument_count; ++i) {
    send_text(config->arguments[i].name);
    send_numbers(config->arguments[i].kind_and_value, 2);
  }
  send_numbers(config->grid, 6);

  uint64_t size;
  char* message = receive_blob(&size);
  if (size) fprintf(stderr, "host_gpu: %s\n", message);
  free(message);
  if (size) {
    for (size_t i = 0; i < count; ++i) mlx_array_free(arrays[i]);
    pthread_mutex_unlock(&server_lock);
    return 1;
  }
  mlx_vector_array written = mlx_vector_array_new();
  for (size_t i = 0; i < kernel->outputs; ++i) {
    int shape[MOST_AXES];
    const int64_t* line = config->shapes[i];
    for (int axis = 0; axis < line[1]; ++axis) shape[axis] = (int)line[2 + axis];
    char* bytes = receive_blob(&size);
    const mlx_array array = mlx_array_new_data(bytes, shape, (int)line[1], (mlx_dtype)line[0]);
    mlx_vector_array_append_value(written, array);
    mlx_array_free(array);
    free(bytes);
  }
  // Inputs that the kernel changed; nothing comes back of the others.
  for (size_t i = 0; i < count; ++i) {
    char* bytes = receive_blob(&size);
    memcpy(memory_of(arrays[i]), bytes, size);
    free(bytes);
    mlx_array_free(arrays[i]);
  }
  pthread_mutex_unlock(&server_lock);
  mlx_vector_array_free(*outputs);
  *outputs = written;
  return 0;
}
