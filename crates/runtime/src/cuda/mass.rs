//! The attention that each token got, on the device while kernels add to it.

use super::CudaError;
use super::driver::{Context, DeviceMemory, Pinned, Stream};
use crate::attention::Partials;

/// Merged `m` and `l` of a call, and a sum for each of its tokens.
#[derive(Debug)]
pub(super) struct MassMemory {
    totals: DeviceMemory,
    sums: DeviceMemory,
    /// Also where the numbers come from.
    result: Pinned,
}

impl MassMemory {
    /// Brings what a call gave to the device, with sums of 0, in the order of `stream`.
    pub(super) fn new(
        context: &Context, stream: &Stream, result: &Partials, tokens: usize,
    ) -> Result<Self, CudaError> {
        let float = size_of::<f32>();
        let totals_bytes = 2 * result.m().len() * float;
        let totals = DeviceMemory::new(context, "mass", totals_bytes)?;
        let sums = DeviceMemory::new(context, "mass", tokens * float)?;
        let mut pinned = Pinned::new(context, "mass", totals_bytes.max(tokens * float))?;
        let bytes = pinned.bytes_mut()?;
        for (bytes, value) in
            bytes.as_chunks_mut().0.iter_mut().zip(result.m().iter().chain(result.l()))
        {
            *bytes = value.to_le_bytes();
        }
        stream.upload(&pinned, 0..totals_bytes, &totals, 0)?;
        // Waits for the upload.
        pinned.bytes_mut()?.fill(0);
        stream.upload(&pinned, 0..tokens * float, &sums, 0)?;
        Ok(Self { totals, sums, result: pinned })
    }

    /// `m` and `l`, and the sums.
    pub(super) fn memories(&self) -> (&DeviceMemory, &DeviceMemory) {
        (&self.totals, &self.sums)
    }

    /// Waits for the sums and adds them.
    pub(super) fn add_to(&mut self, stream: &Stream, mass: &mut [f32]) -> Result<(), CudaError> {
        stream.download(&self.sums, 0, &mut self.result, 0..size_of_val(mass))?;
        let sums = self.result.bytes()?.as_chunks().0.iter();
        for (mass, sum) in mass.iter_mut().zip(sums) {
            *mass += f32::from_le_bytes(*sum);
        }
        Ok(())
    }
}
