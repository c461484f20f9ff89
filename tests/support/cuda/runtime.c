/* The part of libcudart.so that XLA's CUDA plugin and its kernels call, over the driver of driver.c: the real
 * one asks the driver for tables that are not documented. Kernels are launched, and compute nothing.
 */
#include <stddef.h>
#include <string.h>

int cuDeviceGetAttribute(int *value, int attribute, int device);
int cuDeviceGetCount(int *count);
int cuDriverGetVersion(int *version);
int cuMemcpyAsync(void *to, const void *from, size_t size, void *stream);
int cuMemsetD8Async(void *to, unsigned char value, size_t size, void *stream);
int cuStreamSynchronize(void *stream);

static __thread int device;

int cudaRuntimeGetVersion(int *version) { return cuDriverGetVersion(version); }
int cudaDriverGetVersion(int *version) { return cuDriverGetVersion(version); }
int cudaGetDeviceCount(int *count) { return cuDeviceGetCount(count); }
int cudaGetDevice(int *current) {
    *current = device;
    return 0;
}
int cudaSetDevice(int wanted) {
    device = wanted;
    return 0;
}
int cudaDeviceGetAttribute(int *value, int attribute, int of) { return cuDeviceGetAttribute(value, attribute, of); }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
const char *cudaGetErrorName(int error) { return "cudaError"; }
const char *cudaGetErrorString(int error) { return "an error of the fake CUDA runtime"; }
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    return cuMemcpyAsync(to, from, size, stream);
}
int cudaMemsetAsync(void *to, int value, size_t size, void *stream) {
    return cuMemsetD8Async(to, (unsigned char)value, size, stream);
}
int cudaStreamSynchronize(void *stream) { return cuStreamSynchronize(stream); }

/* Kernels that are compiled into a library announce themselves when it is loaded. */
void **__cudaRegisterFatBinary(void *image) {
    static void *handle;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}
char __cudaInitModule(void **handle) { return 1; }
int cudaGetFuncBySymbol(const void **function, const void *symbol) {
    *function = symbol;
    return 0;
}
/* struct cudaFuncAttributes is smaller than this in all versions. */
int cudaFuncGetAttributes(void *attributes, const void *function) {
    memset(attributes, 0, 64);
    return 0;
}
int cudaFuncSetAttribute(const void *function, int attribute, int value) { return 0; }
