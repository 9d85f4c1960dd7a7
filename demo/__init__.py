"""The demo: real conversations over real text, on engines that share their prefixes through a kvpool cluster."""
