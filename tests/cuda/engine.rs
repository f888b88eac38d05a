//! An engine that computes on the device, as far as its new rows go.

use std::ffi::c_void;
use std::ptr;

use cudarc::driver::sys;
use kvfs::cuda::{CudaError, DeviceRows, WriteBack};
use kvfs::page::Layer;

/// Rows of an engine that computes on the device: one buffer for each layer, used again for each token.
pub(crate) struct Engine {
    stream: *mut c_void,
    /// Pinned, then on the device.
    buffers: Vec<(*mut u8, u64)>,
}

impl Engine {
    /// With a buffer of so many bytes for each layer, in the context that is current.
    pub(crate) fn new(layers: u32, bytes: usize) -> Self {
        let mut stream = ptr::null_mut();
        // SAFETY: the driver writes one handle; the context is current.
        let created = unsafe { sys::cuStreamCreate(&raw mut stream, 1) };
        assert_eq!(created, sys::CUresult::CUDA_SUCCESS);
        let buffer = |_| {
            let (mut host, mut device) = (ptr::null_mut(), 0);
            // SAFETY: the driver writes one address.
            let pinned = unsafe { sys::cuMemHostAlloc(&raw mut host, bytes, 0) };
            // SAFETY: as above.
            let allocated = unsafe { sys::cuMemAlloc_v2(&raw mut device, bytes) };
            assert_eq!(
                (pinned, allocated),
                (sys::CUresult::CUDA_SUCCESS, sys::CUresult::CUDA_SUCCESS)
            );
            (host.cast(), device)
        };
        Self { stream: stream.cast(), buffers: (0..layers).map(buffer).collect() }
    }

    /// "Computes" the rows of a layer, after what `write_back` still copies from the buffer, and gives
    /// them away.
    pub(crate) fn give(
        &self, write_back: &mut WriteBack, layer: u32, bytes: &[u8],
    ) -> Result<(), CudaError> {
        let (host, address) = self.buffers[layer as usize];
        // SAFETY: the stream is alive.
        let idle = unsafe { sys::cuStreamSynchronize(self.stream.cast()) };
        assert_eq!(idle, sys::CUresult::CUDA_SUCCESS);
        // SAFETY: the buffer has so many bytes, and no upload is under way.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), host, bytes.len()) };
        // SAFETY: it is a stream of the device.
        unsafe { write_back.hold(self.stream) }?;
        // SAFETY: both buffers have so many bytes.
        let copied = unsafe {
            sys::cuMemcpyHtoDAsync_v2(address, host.cast(), bytes.len(), self.stream.cast())
        };
        assert_eq!(copied, sys::CUresult::CUDA_SUCCESS);
        let rows = DeviceRows { address, bytes: bytes.len(), stream: self.stream };
        // SAFETY: the buffer is alive, and the stream waits before it is written again.
        unsafe { write_back.append_device(Layer(layer), rows) }
    }
}
