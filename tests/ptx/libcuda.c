/* A libcuda.so.1 without a device, for Triton's driver and launchers: what they ask is answered as an H200 would, and
   kernels are handed to Python (tests/ptx/pretended.py). */
#include <stddef.h>
#include <stdint.h>

typedef int Result;
typedef struct {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared;
  void *stream, *attributes;
  unsigned attribute_count;
} Config;

static Result (*launch)(uint64_t, unsigned, unsigned, unsigned, unsigned, unsigned, uint64_t, unsigned, void **);
static int (*attribute)(uint64_t, int);
static int (*load)(const char *);
static void *context = (void *)1;

void pretend(void *a, void *b, void *c) { launch = a; attribute = b; load = c; }

Result cuInit(unsigned flags) { return 0; }
Result cuDriverGetVersion(int *version) { *version = 13000; return 0; }
Result cuGetErrorString(Result code, const char **text) { *text = "an error of the pretended device"; return 0; }
Result cuDeviceGetCount(int *count) { *count = 2; return 0; }
Result cuDeviceGet(int *device, int number) { *device = number; return 0; }
Result cuDeviceGetAttribute(int *value, int which, int device) {
  switch (which) {
  case 10: *value = 32; break;      /* threads of a warp */
  case 12: *value = 65536; break;   /* registers of a block */
  case 16: *value = 132; break;     /* processors */
  case 75: *value = 9; break;       /* compute capability */
  case 76: *value = 0; break;
  case 81: *value = 233472; break;  /* shared memory of a processor, of a block */
  case 97: *value = 232448; break;
  default: *value = 1;
  }
  return 0;
}
Result cuCtxGetCurrent(void **found) { *found = context; return 0; }
Result cuCtxSetCurrent(void *given) { context = given; return 0; }
Result cuCtxGetDevice(int *device) { *device = (int)(intptr_t)context - 1; return 0; }
Result cuCtxGetLimit(size_t *value, int which) { *value = 0; return 0; }
Result cuCtxSetLimit(int which, size_t value) { return 0; }
Result cuDevicePrimaryCtxRetain(void **found, int device) { *found = (void *)(intptr_t)(device + 1); return 0; }
Result cuModuleLoadData(void **module, const void *image) { *module = (void *)image; return 0; }
Result cuModuleUnload(void *module) { return 0; }
Result cuModuleGetFunction(void **function, void *module, const char *name) {
  int number = load(name);
  *function = (void *)(intptr_t)number;
  return number > 0 ? 0 : 500;
}
Result cuFuncGetAttribute(int *value, int which, void *function) {
  *value = attribute((uint64_t)function, which);
  return 0;
}
Result cuFuncSetAttribute(void *function, int which, int value) { return 0; }
Result cuFuncSetCacheConfig(void *function, int value) { return 0; }
Result cuPointerGetAttribute(void *out, int which, uint64_t pointer) { *(uint64_t *)out = pointer; return 0; }
Result cuStreamIsCapturing(void *stream, int *value) { *value = 0; return 0; }
Result cuLaunchKernelEx(const Config *c, void *function, void **params, void **extra) {
  return launch((uint64_t)function, c->grid_x, c->grid_y, c->grid_z, c->block_x, c->shared, (uint64_t)c->stream,
                c->attribute_count, params);
}
/* Asked for by name, and never called here. */
Result cuOccupancyMaxActiveClusters(void) { return 801; }
Result cuTensorMapEncodeTiled(void) { return 801; }
Result cuTensorMapEncodeIm2col(void) { return 801; }
