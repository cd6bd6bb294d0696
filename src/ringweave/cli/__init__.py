"""The commands of ``ringweave``: pictures, explanations and checks in a shell; they need the extra ``cli``."""
