//! Runs all kernels of a module, as they are or with a change.

use std::path::Path;
use std::process::{Command, Output};
use std::sync::Mutex;
use std::thread::scope;

use crate::library::{ModuleName, Watch, module, program};

/// A run of all kernels of one module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cases<'a> {
    pub(crate) module: ModuleName<'a>,
    pub(crate) watch: Watch,
    /// Settings of each variant.
    pub(crate) seeds: u32,
    /// Where the kernels are.
    pub(crate) kernels: &'a Path,
    /// Which of the bugs that are planted there, 0 for none.
    pub(crate) bug: usize,
}

impl Cases<'_> {
    /// Builds in a directory what is not there yet, and runs it.
    ///
    /// # Panics
    /// If it does not compile.
    #[track_caller]
    pub(crate) fn run(&self, directory: &Path) -> Output {
        let (_, dtype, width) = self.module;
        let mut cases = Command::new(program("cases", self.watch));
        cases.env("TSAN_OPTIONS", "halt_on_error=1").env("KVFS_PLANTED", self.bug.to_string());
        cases.args([&self.seeds.to_string(), dtype, &width.to_string()]);
        for name in [Some(self.module), None] {
            cases.arg(module(directory, self.kernels, self.watch, name));
        }
        cases.output().unwrap()
    }
}

/// Does something for each item, as many at a time as there are cores.
pub(crate) fn for_each<T: Sync>(items: &[T], act: impl Fn(&T) + Sync) {
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(items.len());
    let left = Mutex::new(items.iter());
    scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let next = left.lock().unwrap().next();
                    let Some(item) = next else { return };
                    act(item);
                }
            });
        }
    });
}
