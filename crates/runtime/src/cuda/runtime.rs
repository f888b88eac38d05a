//! The GPU if there is one that will do, else the CPU, and why.

use super::{CudaAttention, CudaError, Settings};
use crate::attention::{
    Attention, AttentionError, InstructionSet, KvBlock, Options, Partials, Queries, Shape,
};
use crate::reader::Backend;

/// Who attends. A GPU that fails is given up, and what it was doing is done by the CPU.
#[derive(Debug)]
pub struct Runtime {
    cuda: Option<CudaAttention>,
    cpu: Attention,
    threads: usize,
    /// Why it is not the GPU.
    why: Option<String>,
}

impl Runtime {
    /// The GPU that the settings name, and so many threads of the CPU for what it does not do.
    ///
    /// # Errors
    /// As [`Attention::new`]: without a GPU there is no error.
    pub fn open(shape: Shape, settings: Settings, threads: usize) -> Result<Self, AttentionError> {
        let cpu = Attention::new(shape, threads)?;
        Ok(match CudaAttention::new(shape, settings) {
            Ok(cuda) => Self { cuda: Some(cuda), cpu, threads, why: None },
            Err(error) => Self { cuda: None, cpu, threads, why: Some(error.to_string()) },
        })
    }

    /// The heads.
    pub fn shape(&self) -> Shape {
        self.cpu.shape()
    }

    /// The GPU; `None` if there is none or it has failed.
    pub fn cuda(&mut self) -> Option<&mut CudaAttention> {
        self.cuda.as_mut()
    }

    /// What a plan says about it.
    pub fn backend(&self) -> Backend {
        match &self.cuda {
            Some(cuda) => Backend::Cuda {
                device: cuda.properties().name.clone(),
                hot_bytes: cuda.hot_bytes_planned(),
            },
            None => Backend::Cpu {
                instructions: InstructionSet::detect(),
                threads: self.threads,
                why: self.why.clone(),
            },
        }
    }

    /// As [`Attention::run`].
    ///
    /// # Errors
    /// As [`Attention::run`].
    pub fn run(
        &mut self, queries: &Queries<'_>, blocks: &[KvBlock<'_>], options: &Options<'_>,
    ) -> Result<Partials, AttentionError> {
        let done = self.on_gpu(|cuda| cuda.run(queries, blocks, options))?;
        done.map_or_else(|| self.cpu.run(queries, blocks, options), Ok)
    }

    /// As [`Attention::run_with_mass`].
    ///
    /// # Errors
    /// As [`Attention::run_with_mass`].
    pub fn run_with_mass(
        &mut self, queries: &Queries<'_>, blocks: &[KvBlock<'_>], options: &Options<'_>,
        mass: &mut [f32],
    ) -> Result<Partials, AttentionError> {
        let done = self.on_gpu(|cuda| cuda.run_with_mass(queries, blocks, options, mass))?;
        done.map_or_else(|| self.cpu.run_with_mass(queries, blocks, options, mass), Ok)
    }

    /// What a GPU makes of it, if there is one that can and does.
    fn on_gpu(
        &mut self, act: impl FnOnce(&mut CudaAttention) -> Result<Partials, CudaError>,
    ) -> Result<Option<Partials>, AttentionError> {
        let Some(cuda) = &mut self.cuda else { return Ok(None) };
        match act(cuda) {
            Ok(partials) => return Ok(Some(partials)),
            Err(CudaError::Attention(error)) => return Err(error),
            // Other calls may be right for it.
            Err(CudaError::Unsupported(_)) => {}
            Err(error) => {
                log::warn!("{error}: from here on the CPU attends");
                (self.cuda, self.why) = (None, Some(error.to_string()));
            }
        }
        Ok(None)
    }
}
