/* The part of libnvidia-ml.so.1 that XLA asks before it takes a machine to have GPUs; it has no details of them. */
#include <string.h>

int cuDeviceGetCount(int *count);
int cuDriverGetVersion(int *version);

int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return "an error of the fake NVML"; }
int nvmlSystemGetCudaDriverVersion(int *version) { return cuDriverGetVersion(version); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return cuDriverGetVersion(version); }
int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    strncpy(version, "580.0.0", size);
    return 0;
}
int nvmlDeviceGetCount_v2(unsigned *count) { return cuDeviceGetCount((int *)count); }
static int handle(void **device) {
    static int any;
    *device = &any;
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { return handle(device); }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { return handle(device); }
