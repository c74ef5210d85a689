"""Learned video worlds: what would the cameras show if these actions were taken?"""
