//! What a daemon does so that another one can go on if it dies.

use std::sync::Arc;

use crossbeam_channel::{Receiver, bounded};

use super::Kept;
use super::kept::Outlives;
use crate::background;
use crate::connection::Source;
use crate::exchange::launch_of_now;
use crate::mount::{MountError, MountOptions};
use crate::shared::Shared;
use crate::told_backings::ToldBackings;
use kvfs_fs::recalled::{self, CheckKeeper};
use kvfs_fs::takeover::{Handover, Launch, Secret, obstacle};
use kvfs_storage::store::metadata::at_risk::Touched;
use kvfs_storage::tier::remote::seal::KeyRing;

/// A daemon whose mount is kept.
pub(crate) struct Arming {
    keeper: Arc<Kept>,
    shared: Arc<Shared>,
    launch: Arc<Launch>,
    keys: Option<Arc<KeyRing>>,
    outlives: Outlives,
    exchanges: u64,
}

impl Arming {
    /// Has what is not durable told from now on, to be called before the first request. A daemon that goes on with a mount is
    /// armed at once: what it tells somebody, the next one does not tell again. Of a mount that is being made that has to be
    /// done when it is, since whoever asked for it is told that there is none if the daemon dies before. `None` as well if
    /// nobody keeps the mount, or it cannot be kept.
    pub(crate) fn prepare(
        options: &MountOptions, keeper: Option<&Arc<Kept>>,
        (shared, source): (&Arc<Shared>, &Source), exchanges: u64, goes_on: Option<&Receiver<()>>,
    ) -> Result<Option<Arming>, MountError> {
        let (Some(keeper), Some(launch)) = (keeper, options.launch.clone()) else {
            return Ok(None);
        };
        let keeper = Arc::clone(keeper);
        let told = Self::outlives(options, shared, source);
        let asked = Arc::clone(&keeper);
        let check = CheckKeeper(Box::new(move || asked.check()));
        shared.fs.core.before.note_keeper(told.as_ref().map(|_| check).map_err(String::clone));
        let armed = match told {
            Ok(outlives) => {
                let shared = Arc::clone(shared);
                let keys = options.remote.as_ref().and_then(|remote| remote.keys.clone());
                Arming { keeper, shared, launch, keys, outlives, exchanges }
            }
            Err(why) => {
                log::warn!("the mount ends if its daemon dies: {why}");
                return Ok(None);
            }
        };
        match goes_on {
            Some(stopped) => armed.start(stopped).map(|()| None),
            None => Ok(Some(armed)),
        }
    }

    fn outlives(
        options: &MountOptions, shared: &Arc<Shared>, source: &Source,
    ) -> Result<Outlives, String> {
        let is_read_only = options.read_only.then(|| "it is mounted read-only".to_owned());
        if let Some(why) = obstacle(&shared.fs).or(is_read_only) {
            return Err(why);
        }
        let notifier = shared.notifier.get().ok_or("there is no connection")?;
        // Names that were lost must not be believed any more.
        notifier.forget_all_names().map_err(|error| {
            format!("this kernel cannot forget all names at once, Linux 6.16 can ({error})")
        })?;
        let why = |error: std::io::Error| error.to_string();
        let lock = shared.fs.store().lock_descriptor();
        let outlives = Outlives {
            device: Arc::clone(&source.device),
            lock: lock.try_clone_to_owned().map_err(why)?,
            request_bytes_max: source.request_bytes_max,
            touched: Touched::memory().map_err(why)?,
            backings: ToldBackings::memory().map_err(why)?,
        };
        recalled::tell_of_changes(&shared.fs.core, &outlives.touched);
        shared.backings.tell(ToldBackings::new(Arc::clone(&outlives.backings)));
        Ok(outlives)
    }

    /// Says with what another daemon would go on, now and whenever a setting has changed, until `stopped` is closed.
    pub(crate) fn start(self, stopped: &Receiver<()>) -> Result<(), MountError> {
        let (teller, changes) = bounded(1);
        self.shared.fs.upgrades.on_settings(teller);
        self.arm();
        let stopped = stopped.clone();
        // It is not waited for: it only sends.
        background::start("kvfs-keeper", move || {
            loop {
                crossbeam_channel::select! {
                    recv(stopped) -> _ => return,
                    recv(changes) -> change => match change {
                        Ok(()) => self.arm(),
                        Err(_) => return,
                    },
                }
            }
        })
        .map(drop)
    }

    fn arm(&self) {
        let fs = &self.shared.fs;
        let launch = launch_of_now(&self.launch, fs, &self.launch.program);
        let armed = launch.map_err(std::io::Error::other).and_then(|launch| {
            let keys = self.keys.as_ref().map(|keys| Secret(keys.reveal()));
            let exchanges = self.exchanges;
            let left = Handover { launch, keys, exchanges, ..Handover::default() };
            self.keeper.arm(&self.outlives, fs.core.before.deaths(), left)
        });
        if let Err(error) = armed {
            log::error!("the keeper of the mount was not told how to go on with it: {error}");
        }
    }
}
