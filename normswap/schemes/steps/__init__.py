"""Steps of a plan that are no targets: what comes before a scheme, or stands alone."""
