//! Faults: what they are called, whom they hit, how they are done and undone.

use super::duration;
use crate::dice::Dice;
use crate::fabric::Condition;
use crate::pool::{Pool, Role};
use crate::record::Record;
use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use serde::Deserialize;
use std::time::Duration;
use tokio::time::sleep;

/// How long a member may take to end after SIGTERM.
const STOPS_WITHIN: Duration = Duration::from_secs(20);
const LEADER_WITHIN: Duration = Duration::from_secs(60);

/// The kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Nothing: the control that the others are compared with.
    None,
    /// SIGKILL, and started again at the end.
    Kill,
    /// SIGSTOP, and SIGCONT at the end.
    Freeze,
    /// SIGTERM, and started again at the end.
    Terminate,
    /// Cut off from `with`, both ways.
    Partition,
    /// What others send does not arrive.
    Deaf,
    /// What it sends does not arrive.
    Mute,
    /// 100 ms and up to 100 ms more each way.
    Delay,
    /// 300 ms, and 5 of 100 pieces are lost once (fault O18).
    Loss,
    /// 1 MiB/s each way.
    Slow,
    /// Ends of connections arrive 10 s late.
    SlowClose,
    /// All connections reset, again and again.
    Reset,
    /// Killed and started again, again and again.
    RestartStorm,
    /// All members of the role, one after the other: SIGTERM, start, healthy.
    RollingRestart,
}

/// A fault as a scenario has it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    pub kind: Kind,
    /// `leader`, `follower`, `coordinator`, `majority`, `coordinators`, `shard`, `shards`, `proxy` (where there are several,
    /// the seed says which), or a name such as `shard-2`.
    #[serde(default = "nobody")]
    pub on: String,
    /// For faults of links: to whom. `all`, `coordinators`, `shards`, `one-coordinator` (the others still hear both: a bridge).
    #[serde(default = "everybody")]
    pub with: String,
    #[serde(rename = "for", deserialize_with = "duration")]
    pub hold: Duration,
}

fn nobody() -> String {
    "nobody".into()
}
fn everybody() -> String {
    "all".into()
}

/// A fault that is in force.
pub struct Injected {
    pub text: String,
    kind: Kind,
    victims: Vec<usize>,
    links: Vec<(String, String)>,
}

impl Fault {
    /// # Errors
    /// It names nobody of a pool of this size, or takes more than the pool can lose.
    pub fn check(&self, coordinators: usize, shards: usize) -> Result<()> {
        let known = [
            "nobody",
            "leader",
            "follower",
            "coordinator",
            "majority",
            "coordinators",
            "shard",
            "shards",
            "proxy",
        ];
        let numbered = |role: &str, most: usize| {
            let number = self.on.strip_prefix(role).and_then(|n| n.parse::<usize>().ok());
            number.is_some_and(|n| (1..=most).contains(&n))
        };
        let named = numbered("coordinator-", coordinators) || numbered("shard-", shards) || numbered("proxy-", 1);
        ensure!(
            known.contains(&self.on.as_str()) || named,
            "on = {:?} is nobody",
            self.on
        );
        let with = ["all", "coordinators", "shards", "one-coordinator"];
        ensure!(with.contains(&self.with.as_str()), "with = {:?} is nobody", self.with);
        let ends = matches!(
            self.kind,
            Kind::Kill | Kind::Terminate | Kind::RestartStorm | Kind::RollingRestart
        );
        ensure!(
            !(ends && self.on.starts_with("proxy")),
            "a proxy that ends takes its clients' connections with it"
        );
        ensure!(
            (self.kind == Kind::None) == (self.on == "nobody"),
            "only the fault `none` hits nobody"
        );
        Ok(())
    }

    /// The role it hits, for pairs.
    #[must_use]
    pub fn role(&self) -> Option<Role> {
        match self.on.as_str() {
            "nobody" => None,
            on if on.starts_with("shard") => Some(Role::Shard),
            on if on.starts_with("proxy") => Some(Role::Proxy),
            _ => Some(Role::Coordinator),
        }
    }

    /// True for a fault that waits for the pool to be well in between, and so can't come with another one.
    #[must_use]
    pub fn comes_alone(&self) -> bool {
        self.kind == Kind::RollingRestart
    }

    /// True when no majority of coordinators is left, so that writes wait for the end of the fault.
    #[must_use]
    pub fn stops_quorum(&self) -> bool {
        matches!(self.on.as_str(), "majority" | "coordinators")
            && !matches!(self.kind, Kind::Reset | Kind::Delay | Kind::RollingRestart)
    }

    /// True when clients of a proxy lose what they are promised with it.
    #[must_use]
    pub fn hits_clients(&self) -> bool {
        self.role() == Some(Role::Proxy)
    }

    async fn victims(&self, pool: &Pool, dice: &mut Dice) -> Result<Vec<usize>> {
        let one = |mut from: Vec<usize>, dice: &mut Dice| {
            let at = usize::try_from(dice.below(from.len() as u64)).unwrap_or(0);
            if from.is_empty() {
                from
            } else {
                vec![from.swap_remove(at)]
            }
        };
        let coordinators = pool.of(Role::Coordinator);
        Ok(match self.on.as_str() {
            "nobody" => Vec::new(),
            "coordinators" => coordinators,
            "shards" => pool.of(Role::Shard),
            "coordinator" => one(coordinators, dice),
            "shard" => one(pool.of(Role::Shard), dice),
            "proxy" => one(pool.of(Role::Proxy), dice),
            "leader" => vec![pool.leader(LEADER_WITHIN).await?],
            "follower" | "majority" => {
                let leader = pool.leader(LEADER_WITHIN).await?;
                let followers: Vec<usize> = coordinators.iter().copied().filter(|at| *at != leader).collect();
                let mut hit = one(followers, dice);
                if self.on == "majority" {
                    hit.push(leader);
                }
                hit
            }
            name => vec![
                pool.members
                    .iter()
                    .position(|m| m.name == name)
                    .context("no such member")?,
            ],
        })
    }

    fn links(&self, pool: &Pool, victims: &[usize], dice: &mut Dice) -> Vec<(String, String)> {
        let mut links = Vec::new();
        for victim in victims {
            let mut others: Vec<usize> = (0..pool.members.len()).filter(|at| !victims.contains(at)).collect();
            match self.with.as_str() {
                "coordinators" => others.retain(|at| pool.members[*at].role == Role::Coordinator),
                "shards" => others.retain(|at| pool.members[*at].role == Role::Shard),
                "one-coordinator" => {
                    others.retain(|at| pool.members[*at].role == Role::Coordinator);
                    others = dice.pick(&others).copied().into_iter().collect();
                }
                _ => {}
            }
            let name = |at: usize| pool.members[at].name.clone();
            links.extend(others.into_iter().map(|other| (name(*victim), name(other))));
        }
        links
    }

    /// Does it. What goes on for a while (resets, storms) is done within the call, so that it takes up to `hold`.
    ///
    /// # Errors
    /// The harness could not do it, or a member did not end or start.
    pub async fn inject(&self, pool: &Pool, record: &Record, dice: &mut Dice) -> Result<Injected> {
        let victims = self.victims(pool, dice).await?;
        let links = self.links(pool, &victims, dice);
        let names: Vec<&str> = victims.iter().map(|at| pool.members[*at].name.as_str()).collect();
        let mut text = self.name();
        if names != [self.on.as_str()] && !names.is_empty() {
            text += &format!(" ({})", names.join(", "));
        }
        if self.is_of_links() && self.with != "all" {
            text += &format!(" with {}", self.with);
            if let ("one-coordinator", [(_, other)]) = (self.with.as_str(), links.as_slice()) {
                text += &format!(" ({other})");
            }
        }
        record.note(format!("fault: {text}, for {:?}", self.hold));
        let injected = Injected {
            text,
            kind: self.kind,
            victims,
            links,
        };
        match self.kind {
            Kind::None => {}
            Kind::Kill => signal_all(pool, &injected.victims, Signal::KILL, true).await?,
            Kind::Terminate => signal_all(pool, &injected.victims, Signal::TERM, true).await?,
            Kind::Freeze => signal_all(pool, &injected.victims, Signal::STOP, false).await?,
            Kind::Reset => reset_again_and_again(pool, &injected.links, self.hold, dice, record).await,
            Kind::RestartStorm => storm(pool, &injected.victims, self.hold, dice).await?,
            Kind::RollingRestart => roll(pool, &injected.victims, record).await?,
            _ => set_links(pool, self.kind, &injected.links),
        }
        if !matches!(self.kind, Kind::Reset | Kind::RestartStorm | Kind::RollingRestart) {
            sleep(self.hold).await;
        }
        Ok(injected)
    }

    fn is_of_links(&self) -> bool {
        use Kind::{Deaf, Delay, Loss, Mute, Partition, Reset, Slow, SlowClose};
        matches!(
            self.kind,
            Partition | Deaf | Mute | Delay | Loss | Slow | SlowClose | Reset
        )
    }

    fn word(&self) -> &'static str {
        match self.kind {
            Kind::None => "",
            Kind::Kill => "kill",
            Kind::Freeze => "freeze",
            Kind::Terminate => "terminate",
            Kind::Partition => "partition",
            Kind::Deaf => "deaf",
            Kind::Mute => "mute",
            Kind::Delay => "delay",
            Kind::Loss => "loss",
            Kind::Slow => "slow",
            Kind::SlowClose => "slow-close",
            Kind::Reset => "reset",
            Kind::RestartStorm => "restart-storm",
            Kind::RollingRestart => "rolling-restart",
        }
    }
}

impl Injected {
    /// Ends it: links are healthy, members run.
    ///
    /// # Errors
    /// A member can't be started.
    pub fn heal(&self, pool: &Pool) -> Result<()> {
        pool.fabric.change(|rules| {
            for (a, b) in &self.links {
                rules.set(a, b, Condition::default());
                rules.set(b, a, Condition::default());
            }
        });
        for at in &self.victims {
            let member = &pool.members[*at];
            match self.kind {
                Kind::Freeze => {
                    ensure!(
                        member.proc.signal(Signal::CONT),
                        "{} has ended while it was frozen",
                        member.name
                    );
                }
                Kind::Kill | Kind::Terminate => pool.start_member(*at)?,
                _ => {}
            }
        }
        Ok(())
    }
}

async fn signal_all(pool: &Pool, victims: &[usize], signal: Signal, ends: bool) -> Result<()> {
    for at in victims {
        let member = &pool.members[*at];
        if !member.proc.signal(signal) {
            bail!(
                "{} had ended by itself: {}",
                member.name,
                crate::pool::tail(member.proc.log())
            );
        }
    }
    for at in victims.iter().filter(|_| ends) {
        pool.members[*at].proc.gone(STOPS_WITHIN).await?;
    }
    Ok(())
}

fn set_links(pool: &Pool, kind: Kind, links: &[(String, String)]) {
    let ms = Duration::from_millis;
    let both = match kind {
        Kind::Partition => Condition::cut(),
        Kind::Delay => Condition {
            delay: ms(100),
            jitter: ms(100),
            ..Condition::default()
        },
        Kind::Loss => Condition {
            delay: ms(300),
            loss_percent: 5,
            ..Condition::default()
        },
        Kind::Slow => Condition {
            rate: 1 << 20,
            ..Condition::default()
        },
        Kind::SlowClose => Condition {
            slow_close: ms(10_000),
            ..Condition::default()
        },
        _ => Condition::default(),
    };
    pool.fabric.change(|rules| {
        for (victim, other) in links {
            let (out, back) = match kind {
                Kind::Mute => (Condition::cut(), Condition::default()),
                Kind::Deaf => (Condition::default(), Condition::cut()),
                _ => (both.clone(), both.clone()),
            };
            rules.set(victim, other, out);
            rules.set(other, victim, back);
        }
    });
}

async fn reset_again_and_again(
    pool: &Pool,
    links: &[(String, String)],
    hold: Duration,
    dice: &mut Dice,
    record: &Record,
) {
    let until = tokio::time::Instant::now() + hold;
    let mut count = 0;
    while tokio::time::Instant::now() < until {
        count += links.iter().map(|(a, b)| pool.fabric.reset(a, b)).sum::<usize>();
        sleep(Duration::from_millis(50) + dice.up_to(Duration::from_millis(1500))).await;
    }
    record.note(format!("{count} connections were reset"));
}

async fn storm(pool: &Pool, victims: &[usize], hold: Duration, dice: &mut Dice) -> Result<()> {
    let until = tokio::time::Instant::now() + hold;
    while tokio::time::Instant::now() < until {
        for at in victims {
            pool.members[*at].proc.kill().await?;
            sleep(dice.up_to(Duration::from_millis(300))).await;
            pool.start_member(*at)?;
        }
        sleep(dice.up_to(Duration::from_millis(2500))).await;
    }
    Ok(())
}

async fn roll(pool: &Pool, victims: &[usize], record: &Record) -> Result<()> {
    for at in victims {
        signal_all(pool, &[*at], Signal::TERM, true).await?;
        pool.start_member(*at)?;
        let took = pool.wait_healthy(Duration::from_secs(120)).await?;
        record.note(format!(
            "{} restarted, healthy after {} ms",
            pool.members[*at].name,
            took.as_millis()
        ));
    }
    Ok(())
}

impl Fault {
    #[must_use]
    pub fn new(kind: Kind, on: &str, hold: Duration) -> Self {
        Fault {
            kind,
            on: on.to_owned(),
            with: everybody(),
            hold,
        }
    }

    /// No fault for a while.
    #[must_use]
    pub fn control() -> Self {
        Self::new(Kind::None, "nobody", Duration::from_secs(3))
    }

    /// What it is called in reports, without its victims.
    #[must_use]
    pub fn name(&self) -> String {
        match self.kind {
            Kind::None => "no fault".to_owned(),
            _ => format!("{} {}", self.word(), self.on),
        }
    }
}
