//! Rule: names the three compaction policies for users. The choice is made at run time, not when the engine is built.

use super::policy::{Emptiest, Linear, Pivot, Policy, ZoneEnds};
use crate::zone::{Kind, Zone};

/// A rule by which compaction chooses page blocks: see [`super::policy`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rule {
    /// Empties the emptiest blocks into the fullest.
    #[default]
    Emptiest,
    /// Scanners from a pivot that moves.
    Pivot,
    /// Scanners from the zone's ends, as in the kernel.
    ZoneEnds,
}

impl Rule {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Emptiest, Self::Pivot, Self::ZoneEnds];

    /// Its number in a group's page.
    pub fn number(self) -> u32 {
        match self {
            Self::Emptiest => 0,
            Self::Pivot => 1,
            Self::ZoneEnds => 2,
        }
    }

    /// The rule with a number, as the group's page holds it. An unknown number gives the default.
    pub fn from_number(n: u32) -> Self {
        Self::ALL.into_iter().find(|r| r.number() == n).unwrap_or_default()
    }

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Emptiest => "emptiest",
            Self::Pivot => "pivot",
            Self::ZoneEnds => "zone-ends",
        }
    }

    /// The policy. The pivot begins in the middle: at the zone's start it would be the old way until it moves, which
    /// takes the longest deferral.
    pub fn policy(self) -> Chosen {
        match self {
            Self::Emptiest => Chosen::Emptiest(Emptiest::new()),
            Self::Pivot => Chosen::Linear(Pivot::in_the_middle()),
            Self::ZoneEnds => Chosen::Linear(ZoneEnds::new()),
        }
    }
}

impl core::str::FromStr for Rule {
    type Err = String;

    /// The rule with a name. The error is one sentence.
    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|r| r.name() == text).ok_or_else(|| {
            let all = Self::ALL.map(Self::name).join(", ");
            format!("no rule of compaction is called `{text}`: choose one of {all}")
        })
    }
}

/// The policy of a [`Rule`].
pub enum Chosen {
    /// Our own.
    Emptiest(Emptiest),
    /// Either of the two policies with scanners.
    Linear(Linear),
}

impl Chosen {
    fn policy(&self) -> &dyn Policy {
        match self {
            Self::Emptiest(p) => p,
            Self::Linear(p) => p,
        }
    }

    fn policy_mut(&mut self) -> &mut dyn Policy {
        match self {
            Self::Emptiest(p) => p,
            Self::Linear(p) => p,
        }
    }
}

impl Policy for Chosen {
    fn begin(&mut self, zone: &mut Zone, kind: Kind, goes_on: bool) -> bool {
        self.policy_mut().begin(zone, kind, goes_on)
    }

    fn next_source(&mut self, zone: &mut Zone, kind: Kind) -> Option<(u32, u32)> {
        self.policy_mut().next_source(zone, kind)
    }

    fn source_done(&mut self, zone: &mut Zone, at: u32, found: bool) {
        self.policy_mut().source_done(zone, at, found);
    }

    fn refused(&mut self, zone: &mut Zone, frame: u32) -> bool {
        self.policy_mut().refused(zone, frame)
    }

    fn next_target(&mut self, zone: &mut Zone, kind: Kind) -> Option<(u32, u32)> {
        self.policy_mut().next_target(zone, kind)
    }

    fn target_done(&mut self, zone: &mut Zone, at: u32, found: bool) {
        self.policy_mut().target_done(zone, at, found);
    }

    fn targets_returned(&mut self) {
        self.policy_mut().targets_returned();
    }

    fn met(&mut self, zone: &mut Zone) {
        self.policy_mut().met(zone);
    }

    fn restart(&mut self, zone: &mut Zone) {
        self.policy_mut().restart(zone);
    }

    fn uses_map(&self) -> bool {
        self.policy().uses_map()
    }

    fn is_worth_another_pass(&self) -> bool {
        self.policy().is_worth_another_pass()
    }

    fn pivot(&self) -> Option<(usize, u64)> {
        self.policy().pivot()
    }

    fn looked_at(&mut self) -> u64 {
        self.policy_mut().looked_at()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::zone::BLOCK_FRAMES;

    #[test]
    fn e_rules_by_name_and_number() {
        for rule in Rule::ALL {
            assert_eq!((rule.name().parse(), Rule::from_number(rule.number())), (Ok(rule), rule));
        }
        let error = "ends".parse::<Rule>().unwrap_err();
        assert_eq!(error, "no rule of compaction is called `ends`: choose one of emptiest, pivot, zone-ends");
        assert_eq!(Rule::from_number(9), Rule::Emptiest);
    }

    #[test]
    fn e2_the_pivot_begins_in_the_middle_and_the_old_way_has_none() {
        for (blocks, middle) in [(8, 4), (7, 3), (1, 0)] {
            let mut zone = Zone::new(blocks * BLOCK_FRAMES as usize);
            let mut pivot = Rule::Pivot.policy();
            // All blocks must be begun first.
            while zone.alloc(Kind::Hole, 0).is_some() {}
            assert!(pivot.begin(&mut zone, Kind::Hole, false));
            assert_eq!(pivot.pivot(), Some((middle, 0)));
        }
        assert!(Rule::ALL.iter().all(|r| r.policy().pivot().is_some() == (*r == Rule::Pivot)));
        assert!(Rule::ALL.iter().all(|r| r.policy().uses_map() == (*r == Rule::Emptiest)));
    }
}
