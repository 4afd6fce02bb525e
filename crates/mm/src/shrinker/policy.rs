//! The write-back policies: names, numbers, and how much pressure each takes.

/// Which objects are written back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Objects that memory pressure has met twice since they were stored.
    SecondChance,
    /// The oldest, beyond a protected number that each store and load raises and that decays.
    Decaying,
    /// The oldest.
    Fifo,
    /// Objects not read back since their block was last written back; then as second chance.
    S3Fifo,
    /// As second chance, with a third chance for objects whose block was read back since it was last written back.
    Reuse,
    /// As second chance under less pressure: a page on disk is more expensive to bring back than one in the pool.
    #[default]
    Balanced,
}

impl Policy {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Balanced, Self::SecondChance, Self::Decaying, Self::Fifo, Self::S3Fifo, Self::Reuse];

    /// Its number in a group's page.
    pub fn number(self) -> u32 {
        match self {
            Self::SecondChance => 0,
            Self::Decaying => 1,
            Self::Fifo => 2,
            Self::S3Fifo => 3,
            Self::Reuse => 4,
            Self::Balanced => 5,
        }
    }

    /// The weight of pressure: eighths of the share taken of the resident set. That part of the pool is met.
    pub(super) fn weight(self) -> u64 {
        match self {
            Self::Balanced => 4,
            _ => 16,
        }
    }

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::SecondChance => "second-chance",
            Self::Decaying => "decaying",
            Self::Fifo => "fifo",
            Self::S3Fifo => "s3-fifo",
            Self::Reuse => "reuse",
            Self::Balanced => "balanced",
        }
    }

    /// The policy with a number, as the group's page holds it. An unknown number gives the default.
    pub fn from_number(n: u32) -> Self {
        match n {
            0 => Self::SecondChance,
            1 => Self::Decaying,
            2 => Self::Fifo,
            3 => Self::S3Fifo,
            4 => Self::Reuse,
            _ => Self::Balanced,
        }
    }
}

impl core::str::FromStr for Policy {
    type Err = String;

    /// The policy with a name. The error is one sentence.
    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|p| p.name() == text).ok_or_else(|| {
            let all = Self::ALL.map(Self::name).join(", ");
            format!("no policy is called `{text}`: choose one of {all}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_are_those_of_one_policy() {
        for policy in Policy::ALL {
            assert_eq!(policy.name().parse(), Ok(policy));
            assert_eq!(Policy::from_number(policy.number()), policy);
        }
        assert!("lru".parse::<Policy>().unwrap_err().contains("balanced, second-chance, decaying"));
        assert_eq!(Policy::from_number(99), Policy::default());
    }
}
